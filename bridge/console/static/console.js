"use strict";
// Without this script every page works; with it, times count and pages follow the store.
(() => {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

  function duration(seconds, exact) {
    const whole = exact || seconds < 120;
    let left = whole ? Math.round(seconds) : 60 * Math.round(seconds / 60);
    const parts = [];
    for (const [unit, size] of units) {
      const count = Math.floor(left / size);
      left -= count * size;
      if (count || (unit === "s" && !parts.length)) parts.push(`${count} ${unit}`);
    }
    return parts.slice(0, 2).join(" ");
  }

  function set(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  // The console's time: this machine's clock may be wrong.
  let ahead = 0;

  function follow(page) {
    ahead = Date.parse(page.body.dataset.now) - Date.now();
  }

  function tick() {
    for (const element of document.querySelectorAll("time[data-relative]")) {
      const seconds = (Date.parse(element.dateTime) - Date.now() - ahead) / 1000;
      set(element, seconds > 0 ? `in ${duration(seconds, true)}` : `${duration(-seconds, false)} ago`);
    }
  }

  const clock = new Intl.DateTimeFormat(undefined, { day: "2-digit", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

  function localize(page) {
    for (const element of page.querySelectorAll("time[data-clock]")) set(element, clock.format(new Date(element.dateTime)));
    for (const element of page.querySelectorAll("time[data-relative]")) element.title = clock.format(new Date(element.dateTime));
    document.getElementById("zone").textContent = `Times are ${clock.resolvedOptions().timeZone}.`;
  }

  function say(text) {
    set(document.getElementById("live"), text);
  }

  function replace(current, fresh) {
    const open = new Set([...current.querySelectorAll("details[open] > summary")].map((one) => one.textContent));
    const focused = current.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    current.replaceChildren(...fresh.childNodes);
    for (const one of current.querySelectorAll("details > summary")) if (open.has(one.textContent)) one.parentElement.open = true;
    if (focused) [...current.querySelectorAll("a[href]")].find((one) => one.getAttribute("href") === focused)?.focus();
  }

  let shown = document.body.dataset.version;
  let busy = false;
  let wanted = shown;

  async function refresh(version) {
    wanted = version;
    if (busy || wanted === shown) return;
    busy = true;
    let asked;
    try {
      do {
        asked = wanted;
        const response = await fetch(location.href, { headers: { accept: "text/html" }, cache: "no-store" });
        if (response.status === 401 || response.status === 403) { say("Your session has expired: reload the page."); return; }
        if (!response.ok) { say("The console does not answer; trying again."); return; }
        const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
        localize(fresh); // before the parts are compared with those on the page
        for (const part of fresh.querySelectorAll("[data-part]")) {
          const current = document.getElementById(part.id);
          if (current) replace(current, part);
        }
        document.title = fresh.title;
        shown = fresh.body.dataset.version;
        follow(fresh);
        tick();
        say("Live.");
      } while (wanted !== asked && wanted !== shown);
    } catch {
      say("The console cannot be reached; trying again.");
    } finally {
      busy = false;
    }
  }

  follow(document);
  localize(document);
  tick();
  setInterval(tick, 1000);
  // Countdowns pass NotBefore and VMs become silent without any event.
  setInterval(() => { shown = ""; refresh(wanted); }, 60000);
  const source = new EventSource("/live");
  source.addEventListener("version", (event) => { say("Live."); refresh(event.data); });
  source.addEventListener("error", () => say("Not live; trying again."));
})();
