/// <summary>Remembers in this process what was told.</summary>
internal sealed class ProcessMemory : IMemory
{
    private readonly Dictionary<(string, string), DateTimeOffset> told = [];

    public Task<DateTimeOffset?> FindAsync(string eventId, string what, CancellationToken stopping) =>
        Task.FromResult(told.TryGetValue((eventId, what), out var at) ? at : (DateTimeOffset?)null);

    public Task AddAsync(string eventId, string what, DateTimeOffset at, CancellationToken stopping)
    {
        told[(eventId, what)] = at;
        return Task.CompletedTask;
    }
}
