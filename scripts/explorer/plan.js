// plan.js: the controls, what they ask the server for, and the page "Plan". The address after # has the choices, so
// that it can be kept or sent to somebody.
"use strict";

let controls;        // from the server: option, label, values, start, unit, meaning of each
let choices = {};    // where each control stands
let tab = "plan";
let lastPlan = null;

// ---- Controls -----------------------------------------------------------------------------------------------------

const isNumber = (control) => typeof control.values[0] === "number";

function shownValue(name) {
  const {unit} = controls[name], value = choices[name];
  if (name === "total_batch" && value === 0) return "one micro-batch";
  if (name === "chunks" && value === 0) return "by schedule";
  if (name === "zero_stage") return String(value);
  return `${count(value)} ${value === 1 ? unit.replace(/ies$/, "ys").replace(/s$/, "") : unit}`;
}

function addControl(name, control) {
  const box = element("div", {class: "control", id: `box-${name}`});
  const label = element("label", {for: `c-${name}`}, control.label);
  let input;
  if (isNumber(control)) {
    label.append(element("output", {for: `c-${name}`, id: `v-${name}`}));
    input = element("input", {type: "range", id: `c-${name}`, min: 0, max: control.values.length - 1, step: 1});
  } else {
    input = element("select", {id: `c-${name}`}, ...control.values.map((v) => element("option", {value: v}, v)));
  }
  const meaning = element("small", {id: `m-${name}`}, element("code", {}, control.option),
                          control.meaning ? ` ${control.meaning}` : "");
  input.setAttribute("aria-describedby", `m-${name}`);
  input.addEventListener("input", () => {
    choices[name] = isNumber(control) ? control.values[Number(input.value)] : input.value;
    changed();
  });
  box.append(label, input, meaning);
  byId("options").append(box);
}

// Sets all controls to where the choices stand. Those that only matter beside another are dimmed.
function showChoices() {
  for (const [name, control] of Object.entries(controls)) {
    const input = byId(`c-${name}`);
    if (!isNumber(control)) {
      input.value = choices[name];
      continue;
    }
    let nearest = 0;
    control.values.forEach((v, k) => { if (v <= choices[name]) nearest = k; });
    input.value = nearest;
    byId(`v-${name}`).textContent = shownValue(name);
    input.setAttribute("aria-valuetext", shownValue(name));
  }
  const needed = {chunks: choices.schedule === "interleaved", schedule: choices.pp > 1, tp_overlap: choices.tp > 1,
                  cp_attention: choices.cp > 1};
  for (const [name, on] of Object.entries(needed)) byId(`box-${name}`).classList.toggle("off", !on);
}

// A choice that would be refused because another control has moved on: back to where it says nothing.
function settle() {
  if (choices.pp === 1 && !["gpipe", "1f1b"].includes(choices.schedule)) choices.schedule = "1f1b";
  if (choices.schedule !== "interleaved") choices.chunks = 0;
  if (choices.tp === 1) choices.tp_overlap = "off";
  if (choices.cp === 1) choices.cp_attention = "ring";
}

function startChoices() {
  return Object.fromEntries(Object.entries(controls).map(([name, control]) => [name, control.start]));
}

function readAddress() {
  choices = startChoices();
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    if (name === "tab" && ["plan", "schedules", "ring"].includes(text)) tab = text;
    if (!Object.hasOwn(controls, name)) continue;
    const control = controls[name];
    const value = isNumber(control) ? Number(text) : text;
    if (isNumber(control) ? Number.isInteger(value) : control.values.includes(value)) choices[name] = value;
  }
}

function writeAddress() {
  const said = Object.entries(choices).filter(([name, value]) => value !== controls[name].start);
  try {
    history.replaceState(null, "", "#" + new URLSearchParams([["tab", tab], ...said]));
  } catch {   // Safari and Firefox refuse more than some hundred within seconds: a slider that is dragged
  }
}

// ---- The page -----------------------------------------------------------------------------------------------------

function figure(name, label, text, value, note = "", bad = false) {
  const box = element("div", {"data-figure": name, "data-value": String(value), ...(bad ? {class: "bad"} : {})});
  box.append(element("dt", {}, label), element("dd", {}, text, note ? element("small", {}, ` ${note}`) : ""));
  return box;
}

function showFigures(plan) {
  const {time, memory_limit_bytes: limit} = plan;
  byId("figures").replaceChildren(
    figure("step_seconds", "time of a step", secondsText(plan.step_seconds), plan.step_seconds),
    figure("tokens_per_second", "speed", `${amount(plan.tokens_per_second)}`, plan.tokens_per_second, "tokens/s"),
    figure("mfu", "model flops utilisation", percent(plan.mfu), plan.mfu),
    figure("memory_bytes", plan.fits ? "memory of a rank: fits" : "memory of a rank: does not fit",
           bytesText(plan.memory_bytes), plan.memory_bytes, `of ${bytesText(limit)}`, !plan.fits),
    figure("exposed", "exposed communication", percent(time.exposed_communication_seconds / plan.step_seconds),
           time.exposed_communication_seconds),
    figure("bubble", "bubble of the pipeline", percent(time.bubble_seconds / plan.step_seconds), time.bubble_seconds),
    figure("micro_batches", "micro-batches of a rank", count(plan.batch.micro_batches), plan.batch.micro_batches,
           "per step"),
    figure("parameters", "parameters", amount(plan.model.parameters), plan.model.parameters));
}

function showTimeline() {
  if (!lastPlan) return;
  const zoom = 2 ** Number(byId("zoom").value);
  byId("zoom-value").textContent = `${zoom}×`;
  if (!lastPlan.stages[0].timeline)
    return byId("timeline").replaceChildren("Too many passes to draw: fewer micro-batches, by a smaller total batch.");
  byId("timeline").replaceChildren(passLegend([lastPlan]), drawTimeline(lastPlan, {zoom}));
}

function showPlan({command, plan, error}) {
  const results = byId("results");
  results.classList.remove("waiting");
  results.classList.toggle("refused", !plan);
  byId("error").hidden = !error;
  byId("error").textContent = error ?? "";
  if (command) byId("command").textContent = command;
  byId("text").hidden = true;
  lastPlan = plan ?? null;
  if (plan) {
    showFigures(plan);
    byId("memory").replaceChildren(...drawMemory(plan));
    byId("time").replaceChildren(...drawTime(plan));
    showTimeline();
  }
}

const latestPlan = latestOnly();
let asked = 0, answered = 0;   // the answer on the page belongs to the last question when they are equal
function changed() {
  settle();
  showChoices();
  writeAddress();
  const question = ++asked, wanted = {...choices};
  document.body.dataset.state = "waiting";
  byId("results").classList.add("waiting");
  latestPlan(async () => {
    showPlan(await ask("/plan", wanted));
    answered = question;
    document.body.dataset.state = asked === answered ? "ready" : "waiting";
    if (tab === "schedules") showSchedules();
  });
}

function showTab(name) {
  tab = name;
  for (const each of ["plan", "schedules", "ring"]) {
    byId(`page-${each}`).hidden = each !== name;
    byId(`tab-${each}`).setAttribute("aria-selected", each === name);
    byId(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
  writeAddress();
  if (name === "schedules") showSchedules();
  if (name !== "ring") stopRing();
}

function addSuggestions(suggested) {
  for (const {name, text, choices: theirs} of suggested) {
    const button = element("button", {type: "button"}, name, element("small", {}, text));
    button.addEventListener("click", () => {
      choices = {...startChoices(), ...theirs};
      changed();
    });
    byId("suggested").append(button);
  }
}

async function begin() {
  let options;
  [options, colours] = await Promise.all(["/options", "/colours.json"].map(async (path) => (await fetch(path)).json()));
  controls = options.controls;
  for (const [name, control] of Object.entries(controls)) addControl(name, control);
  addSuggestions(options.suggested);
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("zoom").addEventListener("input", showTimeline);
  byId("copy").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(byId("command").textContent);
      byId("copy").textContent = "Copied";
    } catch {   // no clipboard for a page from another machine
      getSelection().selectAllChildren(byId("command"));
      byId("copy").textContent = "Selected: press Ctrl-C";
    }
    setTimeout(() => { byId("copy").textContent = "Copy the command"; }, 1500);
  });
  byId("show-text").addEventListener("click", async () => {
    const question = asked;
    const {text, error} = await ask("/text", choices);
    if (question !== asked) return;   // a control has moved on
    byId("text").textContent = text ?? error;
    byId("text").hidden = false;
  });
  const tabs = ["plan", "schedules", "ring"];
  for (const name of tabs) {
    byId(`tab-${name}`).addEventListener("click", () => showTab(name));
    byId(`tab-${name}`).addEventListener("keydown", (event) => {
      const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (!step) return;
      const next = tabs[(tabs.indexOf(name) + step + tabs.length) % tabs.length];
      showTab(next);
      byId(`tab-${next}`).focus();
    });
  }
  window.addEventListener("hashchange", () => {
    readAddress();
    showTab(tab);
    changed();
  });
  beginSchedules();
  beginRing();
  readAddress();
  showTab(tab);
  changed();
}
begin();
