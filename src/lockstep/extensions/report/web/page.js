// Draws the charts of a report with uPlot, from the numbers in the element #data, and keeps the page
// of a running job up to date. Nothing is loaded from anywhere but the page's own address.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const MAX_POINTS_WITH_MARKERS = 40;
  const CURVE_HEIGHT = 190;
  const TIP_DISTANCE = 14; // pixels from the pointer
  const HEAT_LIMIT = 60; // percent at which the colours end

  const view = { axis: "steps", smoothing: 0, logOf: new Map(), allLog: false, zoom: null, hiddenRuns: new Set() };
  let data = JSON.parse(byId("data").textContent);
  let charts = []; // all uPlot objects of the page
  const sync = uPlot.sync("lockstep");

  function css(variable) {
    return getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
  }

  // ---- numbers and times as text ----

  function formatNumber(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 1e7 || size < 1e-4) return value.toExponential(2);
    if (size >= 1e4) return Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");
    return String(Number(value.toPrecision(4)));
  }

  function formatBytes(value) {
    if (value >= 2 ** 30) return `${(value / 2 ** 30).toFixed(2)} GiB`;
    if (value >= 2 ** 20 / 10) return `${(value / 2 ** 20).toFixed(1)} MiB`;
    return `${(value / 2 ** 10).toFixed(1)} KiB`;
  }

  // The labels of an axis have the largest unit in which all of them are whole numbers.
  function bytesLabels(values) {
    const least = Math.min(...values.filter((value) => value !== null && value > 0), 2 ** 40);
    const step = values.length > 1 ? Math.min(least, Math.abs(values[1] - values[0])) : least;
    const units = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
    const [size, name] = units.find(([unit]) => step >= unit) ?? [1, "B"];
    return values.map((value) => (value === null ? "" : `${formatNumber(value / size)} ${name}`));
  }

  function formatSeconds(seconds) {
    if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
    const minutes = Math.floor(seconds / 60);
    const pad = (number) => String(Math.floor(number)).padStart(2, "0");
    if (minutes < 60) return `${minutes}:${pad(seconds % 60)}`;
    return `${Math.floor(minutes / 60)}:${pad(minutes % 60)}:${pad(seconds % 60)}`;
  }

  function formatValue(value, unit) {
    if (value === null || value === undefined) return "–";
    if (unit === "bytes") return formatBytes(value);
    if (unit === "%") return `${formatNumber(value)} %`;
    if (unit === "ms") return `${formatNumber(value)} ms`;
    return formatNumber(value);
  }

  function formatPlace(value) {
    return view.axis === "steps" ? `step ${formatNumber(Math.round(value))}` : formatSeconds(value);
  }

  // ---- the tooltip, which all charts and bars share ----

  function showTip(text, x, y) {
    const tip = byId("tip");
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    let left = x + TIP_DISTANCE;
    if (left + box.width > innerWidth - 4) left = Math.max(4, x - TIP_DISTANCE - box.width);
    let top = y + TIP_DISTANCE;
    if (top + box.height > innerHeight - 4) top = Math.max(4, y - TIP_DISTANCE - box.height);
    tip.style.left = `${left}px`;
    tip.style.top = `${top}px`;
  }

  function hideTip() {
    byId("tip").hidden = true;
  }

  function followBars() {
    document.addEventListener("mousemove", (event) => {
      const part = event.target.closest?.("[data-tip]");
      if (part) showTip(part.dataset.tip, event.clientX, event.clientY);
      else if (!event.target.closest?.(".u-over")) hideTip();
    });
  }

  // ---- what all charts have in common ----

  function zoomAll(min, max) {
    view.zoom = [min, max];
    for (const chart of charts) applyZoom(chart);
    byId("unzoom").disabled = false;
  }

  function applyZoom(chart) {
    const xs = chart.data[0];
    if (view.zoom) chart.setScale("x", { min: view.zoom[0], max: view.zoom[1] });
    else chart.setScale("x", wholeRange(xs));
  }

  function wholeRange(xs) {
    const first = xs[0] ?? 0;
    const last = xs[xs.length - 1] ?? 1;
    return first === last ? { min: first - 1, max: last + 1 } : { min: first, max: last };
  }

  function resetZoom() {
    view.zoom = null;
    for (const chart of charts) applyZoom(chart);
    byId("unzoom").disabled = true;
  }

  function selected(chart) {
    const { left, width } = chart.select;
    if (width < 4) return;
    const min = chart.posToVal(left, "x");
    const max = chart.posToVal(left + width, "x");
    chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (chart.followsAxis || view.axis === "steps") zoomAll(min, max);
  }

  function axisOf(scale, values, size) {
    return { scale, values, size, stroke: css("--soft"), font: "12px system-ui, sans-serif",
      grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1, size: 4 }, gap: 4 };
  }

  // The width of the labels of a vertical axis, so that none is cut off.
  function widthOfLabels(chart, labels) {
    if (!labels || !labels.length) return 40;
    chart.ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    let widest = 0;
    for (const label of labels) widest = Math.max(widest, chart.ctx.measureText(label ?? "").width);
    return Math.ceil(widest / devicePixelRatio) + 14;
  }

  function stepLabels(chart, places) {
    if (view.axis === "seconds") return places.map(formatSeconds);
    return places.map((place) => (Number.isInteger(place) ? formatNumber(place) : ""));
  }

  function onlyStepLabels(chart, places) {
    return places.map((place) => (Number.isInteger(place) ? formatNumber(place) : ""));
  }

  function options(host, height, more) {
    return {
      width: Math.max(200, host.clientWidth), height, padding: [10, 12, 0, 0],
      legend: { show: false },
      cursor: {
        sync: { key: sync.key, scales: ["x", null] },
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => { resetZoom(); return null; } },
        points: { size: 6 },
        ...more.cursor,
      },
      ...more,
      hooks: { setSelect: [selected], ...more.hooks },
    };
  }

  function add(chart, host) {
    charts.push(chart);
    applyZoom(chart);
    chart.resizing = new ResizeObserver(() => {
      if (host.clientWidth) chart.setSize({ width: host.clientWidth, height: chart.height });
    });
    chart.resizing.observe(host);
    chart.over.addEventListener("mouseleave", hideTip);
  }

  function isHovered(chart) {
    return chart.over.matches(":hover");
  }

  // Where the pointer is on the page.
  function pointer(chart) {
    const box = chart.over.getBoundingClientRect();
    return [box.left + chart.cursor.left, box.top + chart.cursor.top];
  }

  // ---- curves ----

  // An exponential moving average, without the bias towards its beginning (as in Adam).
  function smoothed(values, weight) {
    let sum = 0;
    let total = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  }

  function linesOf(curve) {
    return curve.lines.filter((line) => !view.hiddenRuns.has(line.run));
  }

  function isLog(curve) {
    return view.logOf.get(curve.title) ?? view.allLog;
  }

  // The table that uPlot draws: all places on the x axis, then each line, raw and smoothed.
  function tableOf(curve) {
    const lines = linesOf(curve);
    if (!lines.length) return [[0], [null]];
    const tables = [];
    for (const line of lines) {
      const keep = (value) => (isLog(curve) && value !== null && value <= 0 ? null : value);
      const raw = line.values.map(keep);
      const places = line[view.axis];
      if (view.smoothing > 0) tables.push([places, raw, smoothed(line.values, view.smoothing).map(keep)]);
      else tables.push([places, raw]);
    }
    return uPlot.join(tables);
  }

  function seriesOf(curve) {
    const series = [{}];
    for (const line of linesOf(curve)) {
      const color = css(`--run-${line.run % 8}`);
      const points = { show: line.values.length <= MAX_POINTS_WITH_MARKERS, size: 5, fill: color };
      if (view.smoothing > 0) {
        series.push({ stroke: color, alpha: 0.3, width: 1, points: { show: false }, isRaw: true });
      }
      series.push({ stroke: color, width: 1.8, points, label: line.name, run: line.run });
    }
    return series;
  }

  function drawRestarts(chart) {
    if (view.axis !== "steps" || data.run_names.length > 1) return;
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.strokeStyle = css("--soft");
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.lineWidth = devicePixelRatio;
    for (const step of data.restarts) {
      const x = chart.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // The value of a series at a place, or the nearest one before it.
  function valueBefore(chart, series, index) {
    const values = chart.data[series];
    for (let i = index; i >= 0; i -= 1) {
      if (values[i] !== null && values[i] !== undefined) return values[i];
    }
    return null;
  }

  function curveHovered(chart, curve, valueElement) {
    const index = chart.cursor.idx;
    const shown = [];
    chart.series.forEach((series, number) => {
      if (number > 0 && !series.isRaw) shown.push([series, number]);
    });
    if (index === null || index === undefined) {
      valueElement.textContent = lastValue(chart, curve);
      return;
    }
    const hovered = [];
    const runs = new Map(); // the last value of each run: starts of one run share its name
    for (const [series, number] of shown) {
      const exact = chart.data[number][index];
      if (exact !== null && exact !== undefined) runs.set(series.run, [series.label, exact]);
      else if (!runs.has(series.run) && data.run_names.length > 1) {
        const before = valueBefore(chart, number, index);
        if (before !== null) runs.set(series.run, [series.label, before]);
      }
    }
    for (const [, [name, value]] of runs) {
      const prefix = data.run_names.length > 1 ? `${name}: ` : "";
      hovered.push(prefix + formatValue(value, curve.unit));
    }
    valueElement.textContent = data.run_names.length > 1 ? "" : hovered[0] ?? "";
    if (isHovered(chart)) {
      showTip(`${formatPlace(chart.data[0][index])}\n${hovered.join("\n")}`, ...pointer(chart));
    }
  }

  function lastValue(chart, curve) {
    if (data.run_names.length > 1) return "";
    const number = chart.data.length - 1;
    return formatValue(valueBefore(chart, number, chart.data[number].length - 1), curve.unit);
  }

  function drawCurve(curve, host) {
    host.plot.replaceChildren();
    const log = isLog(curve);
    const labels = (_, values) => {
      if (curve.unit === "bytes") return bytesLabels(values);
      return values.map((value) => (value === null ? "" : formatValue(value, curve.unit)));
    };
    const bytes = curve.unit === "bytes" ? { incrs: Array.from({ length: 45 }, (_, power) => 2 ** power) } : {};
    const chart = new uPlot(options(host.plot, CURVE_HEIGHT, {
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      axes: [
        { ...axisOf("x", stepLabels, 30), space: 60 },
        { ...axisOf("y", labels, widthOfLabels), space: 34, ...bytes },
      ],
      series: seriesOf(curve),
      hooks: {
        draw: [drawRestarts],
        setCursor: [(chart) => curveHovered(chart, curve, host.value)],
      },
    }), tableOf(curve), host.plot);
    chart.followsAxis = true;
    chart.curve = curve;
    host.value.textContent = lastValue(chart, curve);
    add(chart, host.plot);
    return chart;
  }

  function makeFigure(curve) {
    const figure = document.createElement("figure");
    figure.setAttribute("aria-label", describe(curve));
    const bar = document.createElement("div");
    bar.className = "bar-of-title";
    const title = document.createElement("h3");
    title.textContent = curve.title;
    const value = document.createElement("span");
    value.className = "value";
    const log = document.createElement("button");
    log.type = "button";
    log.textContent = "log";
    log.title = "Logarithmic vertical axis";
    log.setAttribute("aria-pressed", String(isLog(curve)));
    log.addEventListener("click", () => {
      view.logOf.set(curve.title, !isLog(curve));
      drawCharts();
    });
    bar.append(title, value, log);
    const plot = document.createElement("div");
    plot.className = "plot";
    figure.append(bar, plot);
    return { figure, plot, value };
  }

  // What a curve shows, for readers who cannot see it.
  function describe(curve) {
    const values = curve.lines.flatMap((line) => line.values).filter((value) => value !== null);
    const text = (value) => formatValue(value, curve.unit);
    const least = values.reduce((a, b) => Math.min(a, b));
    const most = values.reduce((a, b) => Math.max(a, b));
    return `${curve.title}: begins at ${text(values[0])}, ends at ${text(values[values.length - 1])}, ` +
      `least ${text(least)}, most ${text(most)}`;
  }

  function drawCurves() {
    const place = byId("curve-charts");
    if (!place) return;
    place.replaceChildren();
    const hosts = data.curves.map((curve) => makeFigure(curve));
    place.append(...hosts.map((host) => host.figure));
    data.curves.forEach((curve, index) => drawCurve(curve, hosts[index]));
  }

  // ---- where the time goes ----

  // The phases are drawn from the sum of all down to the first alone, each over the one before.
  function stackOf(time) {
    const names = Object.keys(time.phases);
    const sums = names.map((_, count) => time.steps.map((_, index) => {
      let sum = 0;
      for (let phase = 0; phase <= count; phase += 1) sum += time.phases[names[phase]][index] ?? 0;
      return sum;
    }));
    return { names: names.reverse(), table: [time.steps, ...sums.reverse()] };
  }

  function drawOverTime() {
    const host = document.querySelector("#over-time .plot");
    if (!host || !data.over_time) return;
    host.replaceChildren();
    const { names, table } = stackOf(data.over_time);
    const top = data.over_time.top;
    const chart = new uPlot(options(host, 260, {
      scales: { x: { time: false }, y: { range: (_, min, max) => [0, Math.min(max || 1, top)] } },
      axes: [
        { ...axisOf("x", onlyStepLabels, 30), space: 60 },
        { ...axisOf("y", (_, values) => values.map((value) => `${formatNumber(value)} ms`), widthOfLabels), space: 40 },
      ],
      series: [{}, ...names.map((name) => ({ fill: css(`--${name}`), width: 0, points: { show: false }, label: name }))],
      cursor: { points: { show: false } },
      hooks: { setCursor: [(chart) => overTimeHovered(chart)] },
    }), table, host);
    add(chart, host);
  }

  function overTimeHovered(chart) {
    const index = chart.cursor.idx;
    if (index === null || index === undefined || !isHovered(chart)) return;
    const time = data.over_time;
    const lines = [];
    let total = 0;
    for (const [name, values] of Object.entries(time.phases)) {
      if (values[index]) lines.unshift(`${data.phase_names[name]}: ${formatValue(values[index], "ms")}`);
      total += values[index] ?? 0;
    }
    const place = `step ${formatNumber(time.steps[index])} · ${formatValue(total, "ms")}`;
    showTip(`${place}\n${lines.join("\n")}`, ...pointer(chart));
  }

  function drawSlowRanks() {
    const figure = byId("slow-ranks");
    if (!figure) return;
    figure.hidden = !data.slow_ranks;
    if (!data.slow_ranks) return;
    const host = figure.querySelector(".plot");
    host.replaceChildren();
    const { steps, ranks } = data.slow_ranks;
    const height = Math.min(560, 60 + Math.max(8, 26 - ranks.length / 3) * ranks.length);
    const rankLabels = (_, places) => places.map((place) => (Number.isInteger(place) ? String(ranks[place] ?? "") : ""));
    const chart = new uPlot(options(host, height, {
      scales: {
        x: { time: false },
        y: { dir: -1, range: () => [-0.5, ranks.length - 0.5] },
      },
      axes: [
        { ...axisOf("x", onlyStepLabels, 30), space: 60 },
        { ...axisOf("y", rankLabels, widthOfLabels), grid: { show: false }, incrs: [1, 2, 4, 8, 16, 32, 64, 128], space: 16 },
      ],
      series: [{}, { points: { show: false } }],
      cursor: { points: { show: false } },
      hooks: { draw: [drawCells], setCursor: [(chart) => rankHovered(chart)] },
    }), [steps, steps.map(() => null)], host);
    add(chart, host);
  }

  function drawCells(chart) {
    const { steps, percent } = data.slow_ranks;
    const { ctx, bbox } = chart;
    const longer = css("--longer");
    const shorter = css("--shorter");
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    percent.forEach((row, place) => {
      const top = chart.valToPos(place - 0.5, "y", true);
      const bottom = chart.valToPos(place + 0.5, "y", true);
      const gap = bottom - top > 8 ? 1 : 0;
      row.forEach((value, column) => {
        const strength = Math.min(1, Math.abs(value) / HEAT_LIMIT);
        if (strength < 0.02) return;
        const begin = chart.valToPos(column ? steps[column - 1] : 2 * steps[0] - (steps[1] ?? steps[0] + 1), "x", true);
        const end = chart.valToPos(steps[column], "x", true);
        ctx.fillStyle = `rgba(${value > 0 ? longer : shorter}, ${strength.toFixed(2)})`;
        // Whole pixels: cells that overlapped or left gaps would show as lines.
        const left = Math.round(begin);
        ctx.fillRect(left, Math.round(top), Math.round(end) - left, Math.round(bottom) - Math.round(top) - gap);
      });
    });
    ctx.restore();
  }

  function rankHovered(chart) {
    const index = chart.cursor.idx;
    if (index === null || index === undefined || !isHovered(chart)) return;
    const { steps, ranks, percent } = data.slow_ranks;
    const place = Math.round(chart.posToVal(chart.cursor.top, "y"));
    if (ranks[place] === undefined) return;
    // The column that the pointer is in ends at the first step that is not before it.
    const at = chart.posToVal(chart.cursor.left, "x");
    let column = steps.findIndex((step) => step >= at);
    if (column < 0) column = steps.length - 1;
    const value = percent[place][column];
    let text = data.texts.median;
    if (value > 0) text = `${value} % ${data.texts.longer}`;
    if (value < 0) text = `${-value} % ${data.texts.shorter}`;
    showTip(`rank ${ranks[place]} · step ${formatNumber(steps[column])}\n${text}`, ...pointer(chart));
  }

  // ---- the page as a whole ----

  function drawCharts() {
    for (const chart of charts) {
      chart.resizing.disconnect();
      chart.destroy();
    }
    charts = [];
    drawCurves();
    drawOverTime();
    drawSlowRanks();
  }

  function connectTools() {
    const smoothing = byId("smoothing");
    if (!smoothing) return;
    smoothing.addEventListener("input", () => {
      view.smoothing = Number(smoothing.value);
      byId("smoothing-value").textContent = smoothing.value;
      drawCharts();
    });
    byId("axis").addEventListener("change", (event) => {
      view.axis = event.target.value;
      view.zoom = null;
      byId("unzoom").disabled = true;
      drawCharts();
    });
    byId("all-log").addEventListener("change", (event) => {
      view.allLog = event.target.checked;
      view.logOf.clear();
      drawCharts();
    });
    byId("unzoom").addEventListener("click", resetZoom);
    for (const box of document.querySelectorAll("[data-run]")) {
      box.addEventListener("change", () => {
        const run = Number(box.dataset.run);
        if (box.checked) view.hiddenRuns.delete(run);
        else view.hiddenRuns.add(run);
        drawCharts();
      });
    }
  }

  // ---- a page that is served while the run goes on ----

  const sectionsOf = (page) => [...page.querySelectorAll("main > *")].map((element) => element.id).join(" ");
  const partsOf = (page) => new Map([...page.querySelectorAll("[data-part]")].map((part) => [part.dataset.part, part.innerHTML]));
  let shownData = byId("data").textContent;
  let shownParts = partsOf(document);
  let shownSections = sectionsOf(document);

  function replacePart(element, html) {
    const open = [...element.querySelectorAll("details")].map((details) => details.open);
    element.innerHTML = html;
    element.querySelectorAll("details").forEach((details, index) => { details.open = open[index] ?? false; });
  }

  function update(text) {
    const page = new DOMParser().parseFromString(text, "text/html");
    document.title = page.title;
    const newData = page.getElementById("data").textContent;
    const chartsDiffer = newData !== shownData;
    shownData = newData;
    data = JSON.parse(newData);
    const parts = partsOf(page);
    if (sectionsOf(page) === shownSections) {
      for (const [name, html] of parts) {
        if (html !== shownParts.get(name)) replacePart(document.querySelector(`[data-part="${name}"]`), html);
      }
      if (chartsDiffer) drawCharts();
    } else { // the first steps were made, for example
      replacePart(document.querySelector("main"), page.querySelector("main").innerHTML);
      replacePart(document.querySelector("header"), page.querySelector("header").innerHTML);
      connectTools();
      drawCharts();
    }
    shownParts = parts;
    shownSections = sectionsOf(page);
  }

  async function poll() {
    const connection = () => byId("connection");
    try {
      const answer = await fetch(location.pathname, { cache: "no-cache" });
      if (!answer.ok) throw new Error(answer.statusText);
      update(await answer.text());
      connection().textContent = "";
      connection().className = "";
    } catch (error) {
      connection().textContent = `: ${data.texts.no_answer} (${error.message})`;
      connection().className = "lost";
    }
  }

  drawCharts();
  connectTools();
  followBars();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
  const refreshSeconds = Number(document.body.dataset.refreshS);
  if (refreshSeconds) setInterval(poll, 1000 * refreshSeconds);
})();
