// charts.js: numbers as text, and plans as SVG. Knows nothing of controls or of the server.
"use strict";

let colours;   // colours.json

// ---- Numbers ------------------------------------------------------------------------------------------------------

const three = (x) => Number(x.toPrecision(3)).toLocaleString("en-US");
const count = (x) => Math.round(x).toLocaleString("en-US");
const percent = (part) => (100 * part).toFixed(1) + " %";
const gib = (bytes) => bytes / 2 ** 30;
function bytesText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const u = bytes > 0 ? Math.min(5, Math.floor(Math.log2(bytes) / 10)) : 0;
  return `${three(bytes / 2 ** (10 * u))} ${units[u]}`;
}
function secondsText(s, largest = s, text = three) {   // largest: of an axis, whose unit all of its labels have
  if (largest >= 1 || largest === 0) return `${text(s)} s`;
  return largest >= 1e-3 ? `${text(s * 1e3)} ms` : `${text(s * 1e6)} µs`;
}
// A label of an axis: of hundreds, zoomed in, three digits do not tell each from the next.
const tickText = (s, end) => secondsText(s, end, (x) => Number(x.toPrecision(6)).toLocaleString("en-US"));
function amount(x) {   // 8.03e9: 8.03 billion, as papers write it
  const units = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];
  const unit = units.find(([size]) => x >= size) ?? [1, ""];
  return three(x / unit[0]) + unit[1];
}

// ---- Elements -----------------------------------------------------------------------------------------------------

function element(name, attributes = {}, ...children) {
  const e = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
  e.append(...children);
  return e;
}
function svg(name, attributes = {}, ...children) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
  e.append(...children);
  return e;
}
const picture = (width, height, label) =>
  svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label});

// names and colours
function legend(entries) {
  const list = element("ul", {class: "legend"});
  for (const [name, colour] of entries) {
    const swatch = element("i");
    swatch.style.background = colour;
    list.append(element("li", {}, swatch, name));
  }
  return list;
}

// heads, and rows of cells; a cell that begins with a digit is set as a number
function table(heads, rows, summary) {
  const isNumber = (column) => rows.length > 0 && rows.every((row) => /^[\d-]/.test(row[column]));
  const cells = (kind, row) =>
    row.map((cell, column) => element(kind, isNumber(column) ? {class: "number"} : {}, cell));
  const body = element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells("td", row))));
  const made = element("table", {}, element("thead", {}, element("tr", {}, ...cells("th", heads))), body);
  return summary ? element("details", {}, element("summary", {}, summary), made) : made;
}

// Round values from 0 up to `end`, about six on each screen.
function ticks(end, screens = 1) {
  const rough = end / 6 / screens, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough);
  return Array.from({length: Math.floor(end / step + 1e-9) + 1}, (_, k) => k * step);
}

// A horizontal axis with grid lines.   x: value to pixel
function axis(into, values, x, top, bottom, text) {
  for (const value of values) {
    into.append(svg("line", {x1: x(value), x2: x(value), y1: top, y2: bottom, class: "grid"}),
                svg("text", {x: x(value), y: bottom + 15, "text-anchor": "middle", class: "soft"}, text(value)));
  }
}

// ---- Memory -------------------------------------------------------------------------------------------------------

// Runs of stages that hold the same, and the ranks that a parameter server serves.
function memoryRows(plan) {
  const rows = [];
  for (const stage of plan.stages) {
    const key = JSON.stringify(stage.memory), last = rows.at(-1);
    if (last?.key === key) last.last = stage.stage;
    else rows.push({key, first: stage.stage, last: stage.stage, rank: stage});
  }
  for (const row of rows)
    row.name = plan.stages.length === 1 ? "each rank"
             : row.first === row.last ? `stage ${row.first}` : `stages ${row.first}–${row.last}`;
  if (plan.other_ranks) rows.push({name: "other ranks", rank: plan.other_ranks});
  return rows;
}

const memoryColour = (name) => colours.memory[name] ?? colours.memory.other;

function drawMemory(plan) {
  const rows = memoryRows(plan), limit = plan.memory_limit_bytes;
  const width = 1000, left = 110, right = 80, row = 30, top = limit ? 24 : 6, bottom = top + rows.length * row;
  const end = Math.max(plan.memory_bytes, limit ?? 0) * 1.04;
  const x = (bytes) => left + bytes / end * (width - left - right);
  const chart = picture(width, bottom + 24, `memory of a rank by name; at most ${bytesText(plan.memory_bytes)}` +
                                            (limit ? ` of ${bytesText(limit)}` : ""));
  axis(chart, ticks(gib(end)).map((g) => g * 2 ** 30), x, top, bottom, (bytes) => `${three(gib(bytes))} GiB`);
  rows.forEach(({name, rank}, k) => {
    const y = top + k * row + 4;
    chart.append(svg("text", {x: left - 8, y: y + 15, "text-anchor": "end"}, name));
    let at = 0;
    const known = rank.memory.filter((m) => m.name in colours.memory);
    const others = rank.memory.filter((m) => !(m.name in colours.memory));
    const rest = {name: "other", bytes: others.reduce((sum, m) => sum + m.bytes, 0)};
    for (const part of [...known, rest]) {
      if (part.bytes === 0) continue;
      chart.append(svg("rect", {x: x(at), y, width: x(at + part.bytes) - x(at), height: row - 8,
                                fill: memoryColour(part.name)},
                       svg("title", {}, `${part.name}: ${bytesText(part.bytes)}`)));
      at += part.bytes;
    }
    chart.append(svg("text", {x: width - right + 8, y: y + 15}, bytesText(at)));
  });
  if (limit)
    chart.append(svg("line", {x1: x(limit), x2: x(limit), y1: top - 4, y2: bottom, class: "limit"}),
                 svg("text", {x: x(limit), y: top - 9, "text-anchor": "middle", class: "limit-text"},
                     `limit ${bytesText(limit)}`));
  const names = [...new Set(rows.flatMap(({rank}) => rank.memory.map((m) => m.name)))];
  const shown = Object.keys(colours.memory).filter((name) => names.includes(name));
  if (names.some((name) => !(name in colours.memory))) shown.push("other");
  const bytesOf = (rank, name) => rank.memory.find((m) => m.name === name)?.bytes ?? 0;
  const cells = names.map((name) => [name, ...rows.map(({rank}) => bytesText(bytesOf(rank, name)))]);
  cells.push(["total", ...rows.map(({rank}) => bytesText(rank.memory_bytes))]);
  return [chart, legend(shown.map((name) => [name, memoryColour(name)])),
          element("div", {class: "scroll"}, table(["", ...rows.map((r) => r.name)], cells, "as a table"))];
}

// ---- Time ---------------------------------------------------------------------------------------------------------

// The parts of a step, which add up to its time: [name, seconds, colour]
function timeParts(plan) {
  const {time, stages} = plan, stage = stages[time.slowest_stage];
  const products = stage.ops.filter((op) => op.flops > 0).reduce((sum, op) => sum + op.seconds, 0);
  const rest = Math.max(0, time.compute_seconds - products - time.update_seconds);
  return [["products and attention", products, colours.time["products and attention"]],
          ["other computation", rest, colours.time["other computation"]],
          ["norm and update", time.update_seconds, colours.time["norm and update"]],
          ...stage.exposed.map(({group, seconds}, k) =>
            [`exposed: ${group}`, seconds, colours.time.exposed[k % colours.time.exposed.length]]),
          ["bubble", time.bubble_seconds, colours.time.bubble]].filter(([, seconds]) => seconds > 0);
}

function drawTime(plan) {
  const parts = timeParts(plan), width = 1000, height = 40, end = plan.step_seconds;
  const chart = picture(width, height + 24, `a step of ${secondsText(end)}: ` +
                                            parts.map(([name, s]) => `${name} ${percent(s / end)}`).join(", "));
  const x = (seconds) => 24 + seconds / end * (width - 48);   // half a label on either side
  axis(chart, ticks(end), x, 0, height, (s) => tickText(s, end));
  let at = 0;
  for (const [name, seconds, fill] of parts) {
    const box = x(at + seconds) - x(at);
    chart.append(svg("rect", {x: x(at), y: 4, width: box, height: height - 8, fill},
                     svg("title", {}, `${name}: ${secondsText(seconds)}, ${percent(seconds / end)}`)));
    at += seconds;
  }
  const rows = parts.map(([name, s]) => [name, secondsText(s), percent(s / end)]);
  const losses = plan.time.losses.filter((loss) => loss.seconds > 0.01 * end)
                     .map((loss) => [loss.what, secondsText(loss.seconds), percent(loss.seconds / end), loss.remedy]);
  return [chart, legend(parts.map(([name, s, colour]) => [`${name} ${percent(s / end)}`, colour])),
          table(["part", "time", "of a step"], rows, "as a table"),
          ...(losses.length ? [table(["lost to", "time", "of a step", "what reduces it"], losses)] : [])];
}

// ---- The schedule -------------------------------------------------------------------------------------------------

const passNames = {forward: "forward", backward: "backward", backward_input: "backward, input part",
                   backward_weight: "backward, weight part", update: "update", idle: "bubble"};

// share: 0, as it is, to 1
function darker(colour, share) {
  const part = (at) => Math.round(parseInt(colour.slice(at, at + 2), 16) * (1 - 0.35 * share));
  return `rgb(${part(1)}, ${part(3)}, ${part(5)})`;
}

// Stages down and time across; chunks after a stage's first are darker. end: of the time axis; zoom: how many times as
// wide as the page
function drawTimeline(plan, {end = plan.step_seconds, zoom = 1, row = 28} = {}) {
  const stages = plan.stages.map((stage) => stage.timeline), P = stages.length;
  const left = 70, width = left + 920 * zoom, bottom = P * row + 4, x = (s) => left + s / end * (width - left - 24);
  const chart = picture(width, bottom + 24, `timeline of ${P} stage${P > 1 ? "s" : ""}, ${secondsText(end)}`);
  chart.style.width = `${100 * zoom}%`;
  axis(chart, ticks(end, zoom), x, 0, bottom, (s) => tickText(s, end));
  stages.forEach((passes, s) => {
    const y = s * row + 3, height = row - 5;
    chart.append(svg("text", {x: left - 8, y: y + height / 2 + 4, "text-anchor": "end"}, `stage ${s}`),
                 svg("rect", {x: x(0), y, width: x(plan.step_seconds) - x(0), height, fill: colours.passes.idle}));
    for (const pass of passes) {
      const box = x(pass.end) - x(pass.begin);
      const shade = Math.floor((pass.chunk ?? 0) / P) / Math.max(1, plan.layout.chunks_per_stage - 1);
      const text = pass.kind === "update" ? "update" : `${passNames[pass.kind]} of micro-batch ${pass.micro_batch}` +
        (plan.layout.chunks_per_stage > 1 ? `, chunk ${pass.chunk}` : "");
      chart.append(svg("rect", {x: x(pass.begin), y, width: Math.max(box - (box > 3 ? 0.8 : 0), 0.2), height,
                                fill: darker(colours.passes[pass.kind], shade), "data-kind": pass.kind},
                       svg("title", {}, `${text}: ${secondsText(pass.begin)} to ${secondsText(pass.end)}`)));
      if (pass.kind !== "update" && box > 8 * String(pass.micro_batch).length + 4)
        chart.append(svg("text", {x: x(pass.begin) + box / 2, y: y + height / 2 + 4, "text-anchor": "middle"},
                         String(pass.micro_batch)));
    }
  });
  return element("div", {class: "scroll", tabindex: "0"}, chart);
}

// The kinds of passes that a plan has.
function passLegend(plans) {
  const kinds = new Set(plans.flatMap((plan) => plan.stages.flatMap((s) => (s.timeline ?? []).map((p) => p.kind))));
  const shown = Object.keys(passNames).filter((kind) => kinds.has(kind));
  if (plans.some((plan) => plan.stages.length > 1)) shown.push("idle");
  return legend(shown.map((kind) => [passNames[kind], colours.passes[kind]]));
}
