"use strict";
// Asks for a new look while somebody looks, tells parts of the page of changes, and draws pictures.
// A page that stays open must not slow a training: nothing moves by itself, and of what a look
// costs, most is paid only when it saw a change.
(() => {
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const isSeen = () => document.visibilityState === "visible";

  const tell = (name) => document.body.dispatchEvent(new CustomEvent(name));

  // Looks again after `data-look` milliseconds; while nothing happens, later and later.
  const LATEST_MS = 10000;
  function keepLooking() {
    const live = document.getElementById("live");
    const clock = live ?? document.querySelector("[data-look]");
    if (!clock) return;
    const least = Number(clock.dataset.look), latest = live ? Math.max(LATEST_MS, least) : least;
    const tellChange = noted(live);
    let pause = least, timer = null, before = null;
    async function look() {
      clearTimeout(timer);
      if (!isSeen()) return;
      if (live) await readLive(live);
      else tell("look");
      const now = live?.querySelector("[data-seen]")?.dataset.seen;
      pause = now === before ? Math.min(1.5 * pause, latest) : least;
      before = now;
      tellChange();
      clearTimeout(timer);
      timer = setTimeout(look, pause);
    }
    timer = setTimeout(look, least);
    document.addEventListener("visibilitychange", () => { pause = least; look(); });
  }

  async function readLive(live) {
    try {
      const response = await fetch(live.dataset.url, { credentials: "same-origin", signal: AbortSignal.timeout(60000) });
      const text = await response.text();
      if (response.ok) live.innerHTML = text;
      else say(live, "The server was started anew, or has an error. Open the URL that it printed.");
    } catch {
      say(live, "The server does not answer. What is shown here may be old.");
    }
  }

  // Tells parts of the page of a change that a look has seen, but no more often than they can bear.
  const BETWEEN_MS = 10000;
  function noted(live) {
    const versionOf = () => live?.querySelector("[data-version]")?.dataset.version;
    let version = versionOf(), told = -BETWEEN_MS, timer = null;
    return () => {
      const now = versionOf();
      if (now === undefined || now === version) return;
      version = now;
      timer ??= setTimeout(() => {
        timer = null;
        told = performance.now();
        tell("changed");
      }, Math.max(0, told + BETWEEN_MS - performance.now()));
    };
  }

  // What a person has under the keyboard or has opened stays so when a part is read again.
  const markOf = (one) => [one.tagName, one.getAttribute("href") ?? one.getAttribute("action"), one.name, one.value, one.getAttribute("aria-label")].join("\n");
  let focused = null, opened = [];

  function remember() {
    const main = document.getElementById("main"), active = document.activeElement;
    // On nothing: another part that was read again has just taken the element away.
    if (active !== document.body) focused = main.contains(active) && active !== main ? { element: active, mark: markOf(active) } : null;
    opened = [...main.querySelectorAll("details")].map((one) => [one.querySelector("summary").textContent, one.open]);
  }

  function restore() {
    const main = document.getElementById("main");
    for (const one of main.querySelectorAll("details")) {
      const before = opened.find(([text]) => text === one.querySelector("summary").textContent);
      if (before) one.open = before[1];
    }
    if (!focused || focused.element.isConnected) return;
    const same = [...main.querySelectorAll("a, button, input, select, [tabindex]")].find((one) => markOf(one) === focused.mark);
    same?.focus({ preventScroll: true });
  }

  async function read(url) {
    const response = await fetch(url, { credentials: "same-origin" });
    if (!response.ok) throw new Error(`${response.status}`);
    return response.json();
  }

  // What of an answer can be seen: not whether it is being read again, unless there is nothing yet.
  function visible({ retry_ms, is_pending, ...rest }) {
    return JSON.stringify([rest, is_pending && !rest.plot && !rest.series?.length]);
  }

  function say(box, text) {
    const note = document.createElement("p");
    note.className = "notice";
    note.textContent = text;
    box.replaceChildren(note);
  }

  // Reads until the server has what is drawn; draws only what changed.
  function keepDrawn(box, urlOf, draw) {
    let drawn = "", turn = 0, last = null;
    const redraw = () => { if (last) draw(box, last); };
    async function again() {
      const mine = ++turn;
      let found;
      try { found = await read(urlOf()); } catch { return say(box, "The picture cannot be read now."); }
      if (mine !== turn) return;
      const text = visible(found);
      if (text !== drawn) { drawn = text; last = found; redraw(); }
      if (found.retry_ms) setTimeout(() => mine === turn && again(), found.retry_ms);
    }
    document.body.addEventListener("changed", again);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    let width = box.clientWidth;
    new ResizeObserver(() => {
      if (Math.abs(box.clientWidth - width) > 8) { width = box.clientWidth; redraw(); }
    }).observe(box);
    again();
    return again;
  }

  // Values of several series at the union of their steps.
  function aligned(series) {
    const steps = [...new Set(series.flatMap((one) => one.points.map((point) => point[0])))].sort((a, b) => a - b);
    const at = new Map(steps.map((step, index) => [step, index]));
    const columns = series.map((one) => {
      const column = new Array(steps.length).fill(undefined);
      for (const [step, value] of one.points) column[at.get(step)] = value;
      return column;
    });
    return [steps, ...columns];
  }

  function options(title, series, width, more) {
    const axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") }, font: "12px system-ui" };
    return {
      title, width, height: 220,
      cursor: { y: false },
      scales: { x: { time: false } },
      axes: [{ ...axis }, { ...axis, size: (_, texts) => 16 + 7.5 * Math.max(3, ...(texts ?? []).map((text) => text.length)), values: (_, ticks) => ticks.map((tick) => Number(tick.toPrecision(6)).toString()) }],
      series: [
        { label: "step" },
        ...series.map((one, index) => ({
          label: one.name, stroke: color(`--s${(index % 6) + 1}`), width: 2, spanGaps: true,
          points: { show: one.points.length < 60, size: 5 },
          value: (_, value) => (value == null ? "–" : Number(value.toPrecision(6)).toString()),
        })),
      ],
      ...more,
    };
  }

  function marksOf(found) {
    const starts = found.plot.starts.filter((start) => start.step !== null);
    return (plot) => {
      const { ctx, bbox } = plot, ratio = devicePixelRatio || 1;
      ctx.save();
      ctx.beginPath(); ctx.rect(bbox.left - 6 * ratio, bbox.top, bbox.width + 12 * ratio, bbox.height + 8 * ratio); ctx.clip();
      for (const start of starts) {
        const x = plot.valToPos(start.step, "x", true);
        ctx.strokeStyle = color(start.before === "failed" ? "--bad" : "--good");
        ctx.lineWidth = 1.5 * ratio;
        ctx.setLineDash(start.before === "failed" ? [] : [5 * ratio, 4 * ratio]);
        ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      }
      ctx.setLineDash([]);
      const y = bbox.top + bbox.height - 5 * ratio;
      ctx.lineWidth = 1.5 * ratio; ctx.strokeStyle = color("--accent");
      for (const mark of found.checkpoints) {
        const x = plot.valToPos(mark.step, "x", true);
        ctx.fillStyle = color(mark.left ? "--back" : "--accent");
        ctx.beginPath(); ctx.arc(x, y, 3.5 * ratio, 0, 7); ctx.fill(); ctx.stroke();
      }
      ctx.restore();
    };
  }

  function nearest(plot, found, left) {
    let best = null, least = 12;
    for (const mark of found.checkpoints) {
      const away = Math.abs(plot.valToPos(mark.step, "x") - left);
      if (away <= least) { least = away; best = mark; }
    }
    return best;
  }

  function padded(low, high, steps) {
    const first = steps.reduce((a, b) => Math.min(a, b), low), last = steps.reduce((a, b) => Math.max(a, b), high);
    const more = Math.max((last - first) * 0.01, 1);
    return [first - more, last + more];
  }

  // Where a curve is level, its last bits are no mountains: at least 2% of the value is shown.
  function spread(low, high) {
    if (low == null) return [0, 1];
    const more = Math.max(high - low, 0.02 * Math.max(Math.abs(low), Math.abs(high)) || 1) - (high - low);
    return uPlot.rangeNum(low - more / 2, high + more / 2, 0.1, true);
  }

  function drawTimeLine(box, found) {
    if (!found.plot) return found.error ? say(box, found.error.text) : undefined;
    const panels = new Map();
    for (const one of found.plot.series) panels.set(one.panel, [...(panels.get(one.panel) ?? []), one]);
    const note = document.getElementById(`${box.id}-note`);
    found.checkpoints.sort((a, b) => b.left - a.left);  // what the run stands on is drawn above
    box.replaceChildren();
    for (const [title, series] of panels) {
      const panel = document.createElement("div");
      panel.className = "panel";
      box.append(panel);
      const steps = found.checkpoints.map((mark) => mark.step);
      const plot = new uPlot(options(title, series, box.clientWidth, {
        hooks: {
          draw: [marksOf(found)],
          setCursor: [(plot) => {
            const mark = plot.cursor.left >= 0 ? nearest(plot, found, plot.cursor.left) : null;
            plot.over.style.cursor = mark ? "pointer" : "";
            if (note && mark) note.textContent = mark.text;
          }],
        },
        scales: { x: { time: false, range: (_, low, high) => padded(low, high, steps) }, y: { range: (_, low, high) => spread(low, high) } },
      }), aligned(series), panel);
      plot.over.addEventListener("click", () => {
        const mark = nearest(plot, found, plot.cursor.left);
        if (mark) location.assign(mark.href);
      });
    }
  }

  function drawCosts(box, found) {
    if (!found.series.length) return say(box, found.is_pending ? "Reading the saves…" : "No save has recorded what it took.");
    box.replaceChildren();
    new uPlot(options("seconds by phase", found.series, box.clientWidth, {}), aligned(found.series), box);
  }

  function start() {
    document.addEventListener("htmx:before:swap", remember);
    document.addEventListener("htmx:after:swap", () => restore());
    keepLooking();
    for (const box of document.querySelectorAll("[data-plot]")) {
      const select = document.querySelector(`select[data-for="${box.id}"]`);
      const url = () => box.dataset.plot + (select?.value ? `?metric=${encodeURIComponent(select.value)}` : "");
      const again = keepDrawn(box, url, drawTimeLine);
      select?.addEventListener("change", again);
    }
    for (const box of document.querySelectorAll("[data-costs]")) keepDrawn(box, () => box.dataset.costs, drawCosts);
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start); else start();
})();
