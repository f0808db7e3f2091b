// Several runs: a table, their curves in shared charts, and the settings in which they differ.

const OVERLAYS = [["Mean reward", "reward/mean"], ["Correct rollouts", "reward/correct_rate"], ["Held-out accuracy", "eval/accuracy"], ["Loss", "loss/total"], ["Entropy of the policy", "policy/entropy"], ["Length of answers", "rollout/length_mean"], ["Sampler and trainer", "mismatch/abs_mean"], ["Groups with signal", "batch/kept_ratio"], ["Seconds per step", "time/step_s"]];
const chosenRuns = () => data.runs.filter(run => ui.runs[run.name] !== false);

function drawRunsHead() {
  const top = byId("top");
  top.textContent = "";
  document.title = `${data.runs.length} runs`;
  make(top, "h1", visible(`${data.runs.length} runs in ${data.folder}`));
  const nav = make(top, "nav", undefined, "", {"aria-label": "sections of the page"});
  for (const [id, text] of SECTIONS) make(nav, "a", text, "", {href: "#" + id});
}

function drawRunsTable(parent) {
  const table = make(make(parent, "div", undefined, "scroll card"), "table", undefined, "left", {id: "runs-table"}), head = make(make(table, "thead"), "tr"), body = make(table, "tbody");
  for (const name of ["run", "state", "step", "model", "loss", "mean reward", "held-out accuracy"]) make(head, "th", name);
  data.runs.forEach((run, index) => {
    const row = make(body, "tr"), cell = make(row, "td"), label = make(cell, "label"), box = make(label, "input", undefined, "", {type: "checkbox", id: "run-" + index, "aria-label": "show the curves of " + run.name});
    box.checked = ui.runs[run.name] !== false;
    box.addEventListener("change", () => { ui.runs[run.name] = box.checked; redrawAll(); });
    make(cell, "span", "● ").style.color = `var(--c${index % COLOURS})`;
    make(cell, "a", visible(run.name), "", {href: run.link});
    make(make(row, "td"), "span", run.status.state, "badge " + (STATES[run.status.state] || ""));
    const last = run.evals.at(-1) || {}, reward = run.series.columns["reward/mean"];
    for (const text of [`${run.status.step || 0} of ${run.card.steps}`, visible(run.card.facts.model ?? "–"), visible(run.card.facts.loss ?? "–"), show(reward && reward.mean.at(-1)), show(last["eval/accuracy"])]) make(row, "td", text);
  });
}

function overlay(metric) {
  return chosenRuns().map(run => {
    const colour = `var(--c${data.runs.indexOf(run) % COLOURS})`, column = run.series.columns[metric];
    if (column) return {label: run.name, metric, steps: run.series.steps, ...column, colour};
    const lines = run.evals.filter(line => Number.isFinite(line[metric]));
    return lines.length ? {label: run.name, metric, steps: lines.map(line => line.step), mean: lines.map(line => line[metric]), dots: true, colour} : null;
  });
}

function drawOverlays(parent) {
  const controls = make(parent, "div", undefined, "controls"), grid = make(parent, "div", undefined, "grid charts");
  field(controls, "smoothing", "smooth", "range", () => drawn.forEach(draw => draw()), {min: 0, max: 0.95, step: 0.05});
  for (const [title, metric] of OVERLAYS) chart(grid, title, overlay(metric));
}

function drawDifferences(parent) {
  const runs = chosenRuns(), keys = [...new Set(runs.flatMap(run => Object.keys(run.settings)))].sort();
  const different = keys.filter(key => new Set(runs.map(run => JSON.stringify(run.settings[key]))).size > 1);
  if (!different.length) { make(parent, "p", runs.length > 1 ? "The settings of these runs are the same." : "Select two or more runs.", "soft"); return; }
  const table = make(make(parent, "div", undefined, "scroll card"), "table", undefined, "left wrap", {id: "differences"}), head = make(make(table, "thead"), "tr"), body = make(table, "tbody");
  make(head, "th", "setting");
  for (const run of runs) make(head, "th", visible(run.name));
  for (const key of different) {
    const row = make(body, "tr");
    make(row, "td", visible(key));
    for (const run of runs) make(row, "td", key in run.settings ? visible(JSON.stringify(run.settings[key])) : "–");
  }
}
