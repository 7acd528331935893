// ask.js: questions to the server, one at a time.
"use strict";

const byId = (id) => document.getElementById(id);

// Runs the last of the jobs that it is given, one at a time: while a plan is computed, a slider may move on.
function latestOnly() {
  let running = false, next = null;
  return async function start(job) {
    next = job;
    if (running) return;
    running = true;
    while (next) {
      const now = next;
      next = null;
      await now();
    }
    running = false;
  };
}

// {"command", "plan"}, {"command", "text"}, or {"error"}
async function ask(path, wanted) {
  try {
    const answer = await fetch(path, {method: "POST", headers: {"Content-Type": "application/json"},
                                      body: JSON.stringify(wanted)});
    return await answer.json();
  } catch (error) {
    return {error: `explorer.py does not answer (${error.message}): is it still running?`};
  }
}
