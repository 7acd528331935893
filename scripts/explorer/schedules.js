// schedules.js: the page "Schedules of a pipeline": the same model by each schedule, below each other on one time axis.
// Every picture is a plan of its own.
"use strict";

const schedules = [
  {name: "Naive", text: "one micro-batch, as large as all together", naive: true, choices: {schedule: "gpipe"}},
  {name: "GPipe", text: "all forwards, then all backwards", choices: {schedule: "gpipe"}},
  {name: "1F1B", text: "each backward as soon as it can run: less memory", choices: {schedule: "1f1b"}},
  {name: "Interleaved", text: "two chunks of layers on each stage", choices: {schedule: "interleaved", chunks: 2}},
  {name: "Zero-bubble, ZB-H1", text: "weight parts of the backward fill the gaps", choices: {schedule: "zb-h1"}},
  {name: "Zero-bubble, ZB-V", text: "and two chunks, down and up again", choices: {schedule: "zb-v"}}];

const stagesChosen = () => 2 ** Number(byId("s-stages").value);
const batchesChosen = () => Number(byId("s-batches").value);

// One pipeline: all ranks are its stages, times tensor and context parallelism.
function choicesOf({naive, choices: own}) {
  const {model, machine, dtype, tp, tp_overlap, cp, cp_attention, batch_size, seq_len, recompute} = choices;
  const stages = stagesChosen(), batches = batchesChosen();
  return {model, machine, dtype, tp, tp_overlap, cp, cp_attention, seq_len, recompute, zero_stage: 0, replicas: 1,
          ep: 1, ranks: stages * tp * cp, pp: stages, batch_size: naive ? batch_size * batches : batch_size,
          total_batch: batch_size * batches * seq_len, chunks: 0, ...own};
}

function scheduleTitle({name, text}, plan) {
  const bubble = plan && (plan.time.bubble_seconds / plan.step_seconds);
  const facts = plan && ` — ${secondsText(plan.step_seconds)}, ${percent(bubble)} bubble, ` +
                        `${bytesText(plan.memory_bytes)} per rank${plan.fits ? "" : ", which does not fit"}`;
  return element("h2", {}, name, element("small", {}, ` ${text}${facts ?? ""}`));
}

function drawSchedules(answers) {
  const plans = answers.map(({plan}) => plan).filter(Boolean);
  const end = Math.max(...plans.map((plan) => plan.step_seconds));
  byId("s-legend").replaceChildren(passLegend(plans));
  byId("s-charts").replaceChildren(...answers.map(({plan, error}, k) => {
    const box = element("section", {"data-schedule": schedules[k].name, "data-seconds": plan?.step_seconds ?? ""});
    box.append(scheduleTitle(schedules[k], plan));
    box.append(plan?.stages[0].timeline ? drawTimeline(plan, {end, row: 22}) : error ?? "too many passes to draw");
    return box;
  }));
}

const latestSchedules = latestOnly();
let schedulesAsked = "", schedulesQuestion = 0;   // for which choices; the latest
function showSchedules() {
  byId("s-stages-value").textContent = `${stagesChosen()} stage${stagesChosen() === 1 ? "" : "s"}`;
  byId("s-batches-value").textContent = `${batchesChosen()} micro-batch${batchesChosen() === 1 ? "" : "es"}`;
  const wanted = schedules.map(choicesOf), key = JSON.stringify(wanted);
  if (key === schedulesAsked) return;
  schedulesAsked = key;
  const question = ++schedulesQuestion;
  byId("s-charts").dataset.state = "waiting";
  byId("s-status").textContent = "planning …";
  latestSchedules(async () => {
    const answers = [];
    for (const each of wanted)
      if (question === schedulesQuestion) answers.push(await ask("/plan", each));
    if (question !== schedulesQuestion) return;
    drawSchedules(answers);
    if (!answers.every(({command}) => command)) schedulesAsked = "";   // no answer: ask again
    byId("s-status").textContent = `${choices.model} on ${wanted[0].ranks} GPUs of ${choices.machine}, ` +
      `${count(wanted[0].total_batch)} tokens per step`;
    byId("s-charts").dataset.state = "ready";
  });
}

function beginSchedules() {
  for (const id of ["s-stages", "s-batches"]) byId(id).addEventListener("input", showSchedules);
}
