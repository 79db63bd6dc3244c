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
    return JSON.stringify([rest, is_pending && !rest.panels.length]);
  }

  function say(box, text) {
    const note = document.createElement("p");
    note.className = "notice";
    note.textContent = text;
    box.replaceChildren(note);
  }

  // What a person has chosen for curves, on all pages of this tab.
  const KEY = "holdfast-curves";
  const view = { smooth: 0, log: false, x: "step" };
  try { Object.assign(view, JSON.parse(sessionStorage.getItem(KEY))); } catch { /* the usual ones */ }

  // Reads until the server has what is drawn; draws only what changed.
  function keepDrawn(box, urlOf, draw) {
    let drawn = "", turn = 0, last = null;
    const redraw = () => { if (last) draw(last); };
    async function again() {
      const mine = ++turn;
      let found;
      try { found = await read(urlOf()); } catch { return say(box, "The curves cannot be read now."); }
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
    return { again, redraw };
  }

  // Mean that forgets, as in TensorBoard; `per` values of the run are in each place.
  function smoothed(values, per) {
    const keep = view.smooth ** per;
    let mean = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = keep * mean + (1 - keep) * value;
      weight = keep * weight + 1 - keep;
      return mean / weight;
    });
  }

  const digits = (value) => Number(value.toPrecision(6)).toString();
  const moment = (value, from, to) => new Date(1000 * value).toISOString().replace("T", " ").slice(from, to);
  const UNITS = [[86400, "days"], [3600, "hours"], [60, "minutes"], [1, "seconds"]];

  // The axis of an answer: its label, its unit in those of the answer, and how it writes values.
  function axisOf(found) {
    if (found.axis === "step") return { label: "step", unit: 1, write: digits };
    if (found.axis === "time") return { label: "time (UTC)", unit: 1, write: (value) => moment(value, 0, 19), isTime: true };
    const [unit, name] = UNITS.find(([unit]) => (found.x.at(-1) ?? 0) > 2 * unit) ?? UNITS[3];
    return { label: `${name} since the start`, unit, write: digits };
  }

  const lineStyle = (size) => ({ stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), size: 4 }, font: "12px system-ui", ...size });
  const known = (column, at) => { while (at > 0 && column[at] == null) at -= 1; return column[at]; };

  // Columns and series of a panel. What lies below and above a mean is a band around its line.
  function seriesOf(panel, axis, isLog) {
    const columns = [], series = [], bands = [];
    const add = (values, one) => {
      columns.push(isLog ? values.map((value) => (value > 0 ? value : null)) : values);
      series.push({ spanGaps: true, width: 2, points: { show: false }, ...one });
    };
    const names = [...new Set(panel.curves.map((curve) => curve.name))];
    panel.curves.forEach((curve) => {
      const stroke = color(`--s${(names.indexOf(curve.name) % 10) + 1}`), isSmooth = view.smooth > 0 && !curve.branch;
      if (curve.low && !isSmooth && panel.curves.length < 5) {
        bands.push({ series: [series.length + 2, series.length + 1], fill: `${stroke}33` });
        add(curve.low, { class: "aux", stroke: "transparent", width: 0 });
        add(curve.high, { class: "aux", stroke: "transparent", width: 0 });
      }
      if (isSmooth) add(curve.mean, { class: "aux", stroke: `${stroke}55`, width: 1 });
      add(isSmooth ? smoothed(curve.mean, curve.per) : curve.mean, {
        label: curve.name, stroke, ...(curve.branch ? { class: "aux", width: 1.5, dash: [3, 3] } : {}),
        points: { show: !curve.branch && curve.mean.filter((value) => value !== null).length < 60, size: 5 },
        value: (plot, _, at, index) => { const value = known(plot.data[at], index ?? plot.data[0].length - 1); return value == null ? "–" : digits(value); },
      });
    });
    const x = { label: axis.label, value: (plot, _, at, index) => axis.write(plot.data[0][index ?? plot.data[0].length - 1]) };
    return { columns, series: [x, ...series], bands };
  }

  function drawMarks(plot, found, axis) {
    const { ctx, bbox } = plot, ratio = devicePixelRatio || 1;
    const place = (one) => plot.valToPos(one[found.axis] / axis.unit, "x", true);
    ctx.save();
    ctx.beginPath(); ctx.rect(bbox.left - 6 * ratio, bbox.top, bbox.width + 12 * ratio, bbox.height + 8 * ratio); ctx.clip();
    ctx.lineWidth = 1.5 * ratio;
    for (const start of found.starts) {
      if (start[found.axis] === null) continue;
      ctx.strokeStyle = color(start.failed ? "--bad" : "--good");
      ctx.setLineDash(start.failed ? [] : [5 * ratio, 4 * ratio]);
      ctx.beginPath(); ctx.moveTo(place(start), bbox.top); ctx.lineTo(place(start), bbox.top + bbox.height); ctx.stroke();
    }
    ctx.setLineDash([]);
    for (const mark of found.marks) {
      if (mark[found.axis] === null) continue;
      ctx.strokeStyle = color(mark.state === "deleted" ? "--gone" : "--accent");
      ctx.fillStyle = color({ kept: "--accent", deleted: "--gone" }[mark.state] ?? "--back");
      ctx.beginPath(); ctx.arc(place(mark), bbox.top + bbox.height - 5 * ratio, (mark.state === "deleted" ? 2.5 : 3.5) * ratio, 0, 7); ctx.fill(); ctx.stroke();
    }
    ctx.restore();
  }

  function nearest(plot, found, axis) {
    let best = null, least = 12;
    for (const mark of found.marks) {
      if (mark[found.axis] === null) continue;
      const away = Math.abs(plot.valToPos(mark[found.axis] / axis.unit, "x") - plot.cursor.left);
      if (away <= least) { least = away; best = mark; }
    }
    return best;
  }

  function padded(low, high, places) {
    const first = places.reduce((a, b) => Math.min(a, b), low), last = places.reduce((a, b) => Math.max(a, b), high);
    const more = (last - first) * 0.01 || 1;
    return [first - more, last + more];
  }

  // Where a curve is level, its last bits are no mountains: at least 2% of the value is shown.
  function spread(low, high) {
    if (low == null) return [0, 1];
    const more = Math.max(high - low, 0.02 * Math.max(Math.abs(low), Math.abs(high)) || 1) - (high - low);
    return uPlot.rangeNum(low - more / 2, high + more / 2, 0.1, true);
  }

  function spreadLog(low, high) {
    if (low == null) return [1, 10];
    const more = Math.max((high / low) ** 0.05, 1.05);
    return [low / more, high * more];
  }

  // Round values on a log scale: of each power of ten, or as on a linear scale where there is none.
  function logTicks(low, high) {
    const found = [], ratio = high / low;
    const power = 10 ** Math.floor(Math.log10(ratio > 30 ? low : (high - low) / 5));
    if (ratio > 30) {
      for (let at = power; at <= high; at *= 10) found.push(...(ratio > 1e4 ? [1] : [1, 2, 5]).map((n) => n * at));
    } else {
      const size = power * [1, 2, 5, 10].find((n) => n * power >= (high - low) / 5);
      for (let n = Math.ceil(low / size); n * size <= high; n += 1) found.push(n * size);
    }
    return found.filter((at) => at >= low && at <= high);
  }

  // Texts of times, of which two neighbors differ by `step` seconds.
  function timesOf(plot, ticks, _, space, step) {
    const isLong = ticks.at(-1) - ticks[0] > 86400;
    const [from, to] = step >= 86400 ? [5, 10] : step < 60 ? [11, 19] : [isLong ? 5 : 11, 16];
    return ticks.map((tick) => moment(tick, from, to));
  }

  // `zoom` is called with the ends of a stretch that a person has chosen, or without.
  function drawPanel(box, place, panel, found, zoom) {
    const axis = axisOf(found), isLog = view.log && found.axis !== undefined, { columns, series, bands } = seriesOf(panel, axis, isLog);
    const places = found.marks.map((mark) => mark[found.axis]).filter((at) => at !== null).map((at) => at / axis.unit);
    const note = document.getElementById(`${box.id}-note`);
    const plot = new uPlot({
      title: panel.title, width: place.clientWidth, height: Number(box.dataset.height ?? 230),
      series, bands, tzDate: (seconds) => uPlot.tzDate(new Date(1000 * seconds), "Etc/UTC"),
      legend: { live: true },
      cursor: {
        y: false, drag: { setScale: false },
        sync: { key: box.id, filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } },
        bind: { dblclick: () => () => zoom() },
      },
      scales: {
        x: { time: Boolean(axis.isTime), range: (_, low, high) => padded(low, high, found.zoomed ? [] : places) },
        y: isLog ? { distr: 3, range: (_, low, high) => spreadLog(low, high) } : { range: (_, low, high) => spread(low, high) },
      },
      axes: [
        lineStyle({ label: axis.label, labelSize: 18, labelFont: "12px system-ui", size: 30, ...(axis.isTime ? { values: timesOf } : {}) }),
        lineStyle({ size: (_, texts) => 16 + 7.5 * Math.max(3, ...(texts ?? []).map((text) => text?.length ?? 0)), values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : digits(tick))), ...(isLog ? { splits: (_, index, low, high) => logTicks(low, high), filter: (_, ticks) => ticks } : {}) }),
      ],
      hooks: {
        draw: [(plot) => drawMarks(plot, found, axis)],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width > 4) zoom(plot.posToVal(left, "x") * axis.unit, plot.posToVal(left + width, "x") * axis.unit);
        }],
        setCursor: [(plot) => {
          const mark = plot.cursor.left >= 0 ? nearest(plot, found, axis) : null;
          plot.over.style.cursor = mark?.href ? "pointer" : "";
          if (note && mark) note.textContent = mark.text;
        }],
      },
    }, [found.x.map((at) => at / axis.unit), ...columns], place);
    plot.over.addEventListener("click", () => {
      const mark = plot.select.width > 4 ? null : nearest(plot, found, axis);
      if (mark?.href) location.assign(mark.href);
    });
  }

  function drawPanels(box, found, zoom) {
    if (!found.panels.length) return say(box, found.error?.text ?? (found.is_pending ? "Reading the root…" : "No value is recorded."));
    found.marks.sort((a, b) => (b.state === "deleted") - (a.state === "deleted") || (a.state === "kept") - (b.state === "kept"));  // what the run stands on is drawn above
    const places = found.panels.map(() => Object.assign(document.createElement("div"), { className: "panel" }));
    box.replaceChildren(...places);
    found.panels.forEach((panel, index) => drawPanel(box, places[index], panel, found, zoom));
    const more = (found.num_panels ?? 0) - found.panels.length;
    if (more > 0) box.append(Object.assign(document.createElement("p"), { className: "dim", textContent: `and ${more} more metrics, which the filter finds` }));
  }

  // The runs that are drawn, in the order in which they were chosen, which gives their colors.
  function chooseRuns(changed) {
    const boxes = () => [...document.querySelectorAll("input[name=run]")];
    const chosen = [];
    let isSet = false;  // while the table is still being read, its order is not yet the usual one
    const paint = () => {
      if (!isSet) {
        chosen.splice(0, Infinity, ...boxes().filter((one) => one.defaultChecked).map((one) => one.value));
        isSet = !document.querySelector("#part[hx-trigger*='load delay']");
      }
      for (const one of boxes()) {
        const at = chosen.indexOf(one.value);
        one.checked = at >= 0;
        one.className = at >= 0 ? `s${(at % 10) + 1}` : "";
      }
    };
    document.addEventListener("change", (event) => {
      if (event.target.name !== "run") return;
      isSet = true;
      if (event.target.checked) chosen.push(event.target.value);
      else chosen.splice(chosen.indexOf(event.target.value), 1);
      paint();
      changed();
    });
    const versionOf = () => document.getElementById("part")?.dataset.seen;
    let version = versionOf();
    document.addEventListener("htmx:after:swap", () => {
      const before = chosen.join(), isOld = version !== versionOf();
      version = versionOf();
      paint();
      if (isOld || chosen.join() !== before) changed();
    });
    paint();
    return chosen;
  }

  // The metrics that there are, of which one is drawn.
  function offerMetrics(select, found) {
    if (!select || !found.metrics.length || [...select.options].map((one) => one.value).join("\n") === found.metrics.join("\n")) return;
    select.replaceChildren(...found.metrics.map((name) => new Option(name, name, false, name === found.metric)));
  }

  function startCurves(box) {
    const form = document.querySelector(`form[data-for="${box.id}"]`);
    let range = [];
    const zoom = (...ends) => { range = ends; curves.again(); };
    const chosen = form?.elements.metric ? chooseRuns(() => curves.again()) : [];
    const query = () => [...["metric", "q"].flatMap((name) => (form?.elements[name] ? [[name, form.elements[name].value]] : [])), ...(form?.elements.metric ? [["runs", chosen.join()]] : [])];
    const urlOf = () => `${box.dataset.curves}?${new URLSearchParams([...query(), ...(form ? [["x", view.x]] : []), ...(range.length ? [["from", range[0]], ["to", range[1]]] : [])])}`;
    const curves = keepDrawn(box, urlOf, (found) => {
      offerMetrics(form?.elements.metric, found);
      drawPanels(box, { ...found, zoomed: range.length > 0 }, zoom);
    });
    if (!form) return;
    const { smooth, log, x, shown } = form.elements, csv = form.querySelector("[data-csv]");
    const link = () => { if (form.elements.metric) csv.href = `${csv.dataset.csv.split("?")[0]}?${new URLSearchParams(query())}`; };
    Object.assign(smooth, { value: view.smooth }); Object.assign(log, { checked: view.log }); Object.assign(x, { value: view.x });
    shown.value = view.smooth;
    csv.addEventListener("click", link);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", (event) => {
      Object.assign(view, { smooth: Number(smooth.value), log: log.checked, x: x.value });
      sessionStorage.setItem(KEY, JSON.stringify(view));
      shown.value = view.smooth;
      if (event.target === smooth || event.target === log) return curves.redraw();
      range = [];
      curves.again();
    });
  }

  function start() {
    document.addEventListener("htmx:before:swap", remember);
    document.addEventListener("htmx:after:swap", () => restore());
    keepLooking();
    for (const box of document.querySelectorAll("[data-curves]")) startCurves(box);
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start); else start();
})();
