"use strict";
// Without this script every page works; with it, times count and pages follow the store.
(() => {
  const SILENT_MS = 12_000; // a version comes every 5 s
  const POLL_MS = 10_000; // without a stream
  const OLD_MS = 60_000; // times pass NotBefore without any event
  const ANSWER_MS = 10_000;
  const LONGEST_WAIT_MS = 30_000;
  const RARELY_MS = 300_000;
  const PAUSE_MS = 5_000; // at most, between two fetches of a slow page
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

  function set(id, text) {
    const element = typeof id === "string" ? document.getElementById(id) : id;
    if (element.textContent !== text) element.textContent = text;
  }

  // To the console's time.
  let ahead = 0;

  function follow(page) {
    ahead = Date.parse(page.body.dataset.now) - Date.now();
  }

  function count(page) {
    for (const element of page.querySelectorAll("time[data-relative]")) {
      const seconds = (Date.parse(element.dateTime) - Date.now() - ahead) / 1000;
      const past = `${element.dataset.past ?? ""} ${duration(-seconds, false)} ago`.trim();
      set(element, seconds > 0 ? `in ${duration(seconds, true)}` : past);
    }
  }

  const time = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  const date = { day: "2-digit", month: "short" };
  const clocks = {
    "": new Intl.DateTimeFormat(undefined, { ...date, ...time, second: "2-digit" }),
    today: new Intl.DateTimeFormat(undefined, time),
    short: new Intl.DateTimeFormat(undefined, { ...date, ...time }),
  };

  function localize(page) {
    const today = new Date(Date.now() + ahead).toDateString();
    for (const element of page.querySelectorAll("time")) {
      const at = new Date(element.dateTime);
      if ("relative" in element.dataset) element.title = clocks[""].format(at);
      else if (element.dataset.clock && at.toDateString() === today) set(element, clocks.today.format(at));
      else set(element, clocks[element.dataset.clock].format(at));
    }
    set("zone", `Times are ${clocks[""].resolvedOptions().timeZone}.`);
  }

  // Replaces only what differs: focus and selection stay.
  function update(current, fresh) {
    if (current.isEqualNode(fresh)) return;
    const isSame = current.cloneNode(false).isEqualNode(fresh.cloneNode(false)) && current.childNodes.length === fresh.childNodes.length;
    if (!isSame || !current.childNodes.length) { current.replaceWith(fresh); return; }
    const pairs = [...current.childNodes].map((node, place) => [node, fresh.childNodes[place]]);
    for (const [node, other] of pairs) update(node, other);
  }

  function replace(page) {
    const isError = (one) => Boolean(one.getElementById("part-error"));
    if (isError(document) !== isError(page)) { location.reload(); return; } // such as of an event that has arrived
    const focused = document.activeElement;
    const name = (one) => one.id || one.firstElementChild.textContent;
    const open = new Set([...document.querySelectorAll("details[open]")].map(name));
    for (const one of page.querySelectorAll("details")) one.open = open.has(name(one));
    for (const part of page.querySelectorAll("[data-part]")) {
      const current = document.getElementById(part.id);
      if (!current || "same" in part.dataset) continue;
      current.dataset.hash = part.dataset.hash; // else the whole part is replaced
      update(current, part);
    }
    if (focused.isConnected) return;
    const alike = (one) => (focused.href ? one.href === focused.href : one.textContent === focused.textContent);
    [...document.querySelectorAll(focused.localName)].find(alike)?.focus({ preventScroll: true });
  }

  let title = document.title;
  let shown = document.body.dataset.version;
  let wanted = shown;
  let heardAt = Date.now(); // the last message of the stream
  let confirmedAt = heardAt; // the page was what the console would show
  let loadedAt = heardAt;
  let tryAt = 0;
  let failures = 0;
  let isDoubted = false;
  let isExpired = false;
  let isBusy = false;
  let stream;

  function connect() {
    stream?.close();
    stream = new EventSource("/live");
    stream.addEventListener("version", (event) => {
      heardAt = Date.now();
      wanted = event.data;
      if (wanted === shown) confirmedAt = heardAt;
      if (!failures) tryAt = Math.min(tryAt, heardAt + 1000);
      watch();
    });
    stream.addEventListener("error", () => {
      stream.close();
      isDoubted = true;
      watch();
    });
  }

  // The machine may have slept.
  function doubt() {
    isDoubted = true;
    tryAt = 0;
    watch();
  }

  async function load() {
    const signal = AbortSignal.timeout(ANSWER_MS);
    const shown = [...document.querySelectorAll("[data-hash]")].map((part) => part.dataset.hash).join();
    const response = await fetch(location.href, { headers: { accept: "text/html", "x-shown": shown }, cache: "no-store", redirect: "manual", signal });
    isExpired = response.type === "opaqueredirect" || response.status === 401 || response.status === 403;
    if (!response.ok && response.status !== 404) throw new Error(`status ${response.status}`);
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    if (!page.body.dataset.version) throw new Error("not a page of the console");
    return page;
  }

  async function refresh() {
    const began = Date.now();
    const asked = wanted;
    isBusy = true;
    isDoubted = false;
    try {
      const page = await load();
      follow(page);
      localize(page); // before it is compared with what is shown
      count(page);
      replace(page);
      title = page.title;
      shown = page.body.dataset.version;
      if (wanted === asked) wanted = shown; // a message that is older than the page
      loadedAt = confirmedAt = began;
      failures = 0;
      const isStreaming = stream.readyState !== EventSource.CLOSED && began - heardAt < SILENT_MS;
      if (!isStreaming) connect();
      tryAt = Date.now() + (isStreaming ? Math.min(PAUSE_MS, 3 * (Date.now() - began)) : POLL_MS);
    } catch {
      failures += 1;
      tryAt = Date.now() + (isExpired ? RARELY_MS : Math.min(LONGEST_WAIT_MS, 1000 * 2 ** (failures - 1))) * (0.5 + Math.random() / 2);
    } finally {
      isBusy = false;
      watch();
      setTimeout(watch, tryAt - Date.now());
    }
  }

  function watch() {
    const now = Date.now();
    const isSilent = now - heardAt > SILENT_MS;
    const isStale = failures > 0 || now - confirmedAt > SILENT_MS;
    document.body.classList.toggle("stale", isStale);
    if (isExpired) set("live", "Not live: your session has expired; reload.");
    else if (isStale) set("live", "Not live: the console does not answer; trying again.");
    else set("live", isSilent ? "Updated every 10 s" : "Live");
    set("age", isStale ? `The page is ${duration((now - confirmedAt) / 1000, false)} old.` : "");
    document.title = isStale ? `Not live: ${title}` : title;
    count(document);
    const isDue = failures || isDoubted || isSilent || wanted !== shown || now - loadedAt > OLD_MS;
    if (isDue && !isBusy && now >= tryAt) refresh();
  }

  follow(document);
  localize(document);
  connect();
  watch();
  setInterval(watch, 1000);
  for (const name of ["online", "offline", "pageshow"]) addEventListener(name, (event) => { if (event.persisted !== false) doubt(); });
  addEventListener("beforeprint", () => set("live", `As of ${clocks[""].format(confirmedAt + ahead)}`));
  document.addEventListener("visibilitychange", () => { if (!document.hidden) doubt(); });
})();
