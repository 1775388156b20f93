// orders FILE: each line is a JSON list of CloudEvents in the order of arrival, or {"lost": INSTANT} to give up what has no news since then;
// prints for each line what Story and Notices tell after each of them, "" for nothing.
using System.Text.Json;

foreach (var line in File.ReadLines(args[0]))
{
    var story = new Story("web-0");
    var said = new List<string>();
    var noticed = new List<string>();
    var notice = "";
    var notices = new Notices("web-0", new ProcessMemory(), text => { notice = text; return Task.CompletedTask; });
    foreach (var one in JsonDocument.Parse(line).RootElement.EnumerateArray())
    {
        var body = BinaryData.FromString(one.GetRawText());
        var isLost = one.TryGetProperty("lost", out var before);
        Step? step = null;
        notice = "";
        if (isLost)
            step = story.Lost(before.GetDateTimeOffset());
        else if (ScheduledEvent.Read(body) is { } found)
            step = story.Next(found);
        if (step is not null)
            story.Learn(JsonSerializer.Deserialize<Step>(JsonSerializer.Serialize(step))!);
        if (!isLost && await notices.HandleAsync(body) is { } fault)
            notice = "POISON " + fault;
        said.Add(step?.Line ?? "");
        noticed.Add(notice);
    }
    Console.WriteLine(JsonSerializer.Serialize(new { story = said, notices = noticed }));
}
