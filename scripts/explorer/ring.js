// ring.js: the page "Ring all-reduce": the steps of llmc/comm/ring.h, chunk by chunk, beside those of the naive way.
// Both take 2 (N - 1) steps. In the ring every link carries a chunk, an Nth of the buffer, at the same time; the naive
// way moves a whole buffer over one link after the other.
"use strict";

const wrap = (rank, N) => ((rank % N) + N) % N;

// What moves in step s: [from, to, chunk, is added]
function ringMoves(N, s) {
  const adds = s < N - 1, t = adds ? s : s - (N - 1);
  return Array.from({length: N}, (_, r) => [r, wrap(r + 1, N), wrap(adds ? r - 1 - t : r - t, N), adds]);
}
function naiveMoves(N, s) {
  const gathers = s < N - 1, other = (gathers ? s : s - (N - 1)) + 1;
  const [from, to] = gathers ? [other, 0] : [0, other];
  return Array.from({length: N}, (_, c) => [from, to, c, gathers]);
}

// The set of ranks whose numbers are in each chunk of each rank, after so many steps.
function stateAfter(N, steps, moves) {
  let state = Array.from({length: N}, (_, r) => Array.from({length: N}, () => new Set([r])));
  for (let s = 0; s < steps; ++s) {
    const next = state.map((row) => row.slice());
    for (const [from, to, c, adds] of moves(N, s))
      next[to][c] = adds ? new Set([...state[to][c], ...state[from][c]]) : state[from][c];
    state = next;
  }
  return state;
}

const numberOf = (rank, chunk) => rank + 1 + 10 * chunk;   // what rank `rank` begins with
const sumOf = (ranks, chunk) => [...ranks].reduce((sum, r) => sum + numberOf(r, chunk), 0);

const ringCell = {width: 44, height: 26, left: 62, top: 22};

// share: of the way that the moving chunks of the next step have gone, 0 to 1
function drawRing(N, steps, moves, share) {
  const {width, height, left, top} = ringCell, gap = 10;
  const at = (r, c) => [left + c * width, top + r * (height + gap)];
  const chart = picture(Math.max(left + N * width + 6, 520), top + N * (height + gap),
                        `chunks of ${N} ranks after step ${steps}`);
  const state = stateAfter(N, steps, moves);
  const cell = (x, y, ranks, chunk, moving) => {
    const whole = ranks.size === N;
    const box = svg("rect", {x: x + 1, y, width: width - 3, height, rx: 3,
                             fill: moving ? colours.passes.backward_weight : colours.passes.forward,
                             "fill-opacity": moving ? 1 : 0.15 + 0.85 * ranks.size / N,
                             stroke: whole ? "#16324f" : "#9aa7b5", "stroke-width": whole ? 2.5 : 1},
                    svg("title", {}, `chunk ${chunk}: the sum over ${ranks.size} of ${N} ranks`));
    return [box, svg("text", {x: x + width / 2 - 0.5, y: y + height / 2 + 4, "text-anchor": "middle"},
                     String(sumOf(ranks, chunk)))];
  };
  for (let c = 0; c < N; ++c)
    chart.append(svg("text", {x: at(0, c)[0] + width / 2, y: 14, "text-anchor": "middle", class: "soft"}, String(c)));
  chart.append(svg("text", {x: left - 8, y: 14, "text-anchor": "end", class: "soft"}, "chunk"));
  state.forEach((row, r) => {
    chart.append(svg("text", {x: left - 8, y: at(r, 0)[1] + 17, "text-anchor": "end"}, `rank ${r}`));
    row.forEach((ranks, c) => chart.append(...cell(...at(r, c), ranks, c, false)));
  });
  if (steps < 2 * (N - 1) && share > 0)
    for (const [from, to, c] of moves(N, steps)) {
      const [x, y0] = at(from, c), [, y1] = at(to, c);
      const group = svg("g", {opacity: 0.95}, ...cell(x, y0 + (y1 - y0) * share, state[from][c], c, true));
      chart.append(group);
    }
  return chart;
}

// Two bars on one axis: the time so far.
function drawElapsed(N, steps) {
  const rows = [["ring", steps / N, 2 * (N - 1) / N], ["naive", steps, 2 * (N - 1)]];
  const width = 1000, left = 70, row = 28, bottom = rows.length * row, end = 2 * (N - 1);
  const x = (buffers) => left + buffers / end * (width - left - 30);
  const chart = picture(width, bottom + 24, `ring ${three(steps / N)}, naive ${steps} transfers of a buffer`);
  axis(chart, ticks(end), x, 0, bottom, three);
  rows.forEach(([name, now, all], k) => {
    const y = k * row + 4;
    chart.append(svg("text", {x: left - 8, y: y + 15, "text-anchor": "end"}, name),
                 svg("rect", {x: x(0), y, width: x(all) - x(0), height: row - 8, fill: colours.passes.idle}),
                 svg("rect", {x: x(0), y, width: x(now) - x(0), height: row - 8, fill: colours.passes.forward}));
  });
  return chart;
}

function ringText(N, s) {
  const of = `step ${s < N ? s : s - N + 1} of ${N - 1}`;
  if (s === 0) return "Every rank is about to send another chunk to the next rank, the last one to rank 0.";
  if (s < N - 1) return `Reduce-scatter, ${of}: every rank sent a chunk to the next one, which added it.`;
  if (s === N - 1) return `Reduce-scatter, ${of}: rank r has the sum of chunk r, which is all that a ZeRO shard needs.`;
  if (s < 2 * (N - 1)) return `All-gather, ${of}: every rank passed a finished chunk on.`;
  return `Done: every rank has sent 2 (N − 1) / N = ${three(2 * (N - 1) / N)} buffers, however many ranks there are.`;
}
function naiveText(N, s) {
  if (s === 0) return "Rank 0 is to receive all buffers, one after the other, and send the sum back.";
  if (s < N) return `Rank 0 has added the buffers of ${s} of ${N - 1} ranks; all other links are idle.`;
  if (s < 2 * (N - 1)) return `Rank 0 has sent the sum to ${s - N + 1} of ${N - 1} ranks.`;
  return `Done: rank 0's link has carried 2 (N − 1) = ${2 * (N - 1)} buffers, more with every rank.`;
}

let ringRunning = null;   // an animation frame, while playing
let ringShare = 0;

function showRing() {
  const N = Number(byId("r-ranks").value), last = 2 * (N - 1);
  byId("r-step").max = last;
  const s = Math.min(Number(byId("r-step").value), last);
  byId("r-ranks-value").textContent = `${N} ranks`;
  byId("r-step-value").textContent = `${s} of ${last}`;
  byId("r-ring").replaceChildren(drawRing(N, s, ringMoves, ringShare));
  byId("r-naive").replaceChildren(drawRing(N, s, naiveMoves, ringShare));
  byId("r-ring-text").textContent = ringText(N, s);
  byId("r-naive-text").textContent = naiveText(N, s);
  byId("r-elapsed").replaceChildren(drawElapsed(N, s));
}

function stopRing() {
  if (ringRunning) cancelAnimationFrame(ringRunning);
  ringRunning = null;
  ringShare = 0;
  byId("r-play").textContent = "Play";
}

function ringStep(by) {
  stopRing();
  byId("r-step").value = Number(byId("r-step").value) + by;
  showRing();
}

// A step takes a second and a half, most of which the chunks are on their way; without motion they jump.
function playRing() {
  if (ringRunning) {
    stopRing();
    return showRing();
  }
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches, step = byId("r-step");
  if (step.value === step.max) step.value = 0;
  byId("r-play").textContent = "Stop";
  let began = null;
  const frame = (now) => {
    began ??= now;
    ringShare = still ? 0 : Math.min(1, (now - began) / 1200);
    if (now - began >= 1500) {
      began = now;
      ringShare = 0;
      step.value = Number(step.value) + 1;
    }
    const done = step.value === step.max;
    if (done) stopRing();
    showRing();
    if (!done) ringRunning = requestAnimationFrame(frame);
  };
  ringRunning = requestAnimationFrame(frame);
}

function beginRing() {
  for (const id of ["r-ranks", "r-step"])
    byId(id).addEventListener("input", () => { stopRing(); showRing(); });
  byId("r-back").addEventListener("click", () => ringStep(-1));
  byId("r-next").addEventListener("click", () => ringStep(1));
  byId("r-play").addEventListener("click", playRing);
  showRing();
}
