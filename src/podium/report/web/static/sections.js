// The sections of one run's page except its rollouts: header, numbers, curves, timeline, steps, health.

const STATES = {running: "running", finished: "finished", stopped: "stopped", failed: "failed", killed: "killed"};
const lastOf = (metric, back = 1) => { const column = data.series.columns[metric]; return column ? column.mean.at(-back) : undefined; };
// The steps with all their metrics. The page of a long run has only the last ones.
const exact = () => data.recent.length ? data.recent : data.series.steps.map((step, index) => {
  const line = {step};
  for (const [name, column] of Object.entries(data.series.columns)) line[name] = column.mean[index];
  return line;
});

function drawHead() {
  const top = byId("top"), state = STATES[data.status.state] || "running";
  top.textContent = "";
  document.title = `${data.status.step || 0}/${data.card.steps} ${data.card.title}`;
  if (data.home) make(top, "a", "← runs", "small", {href: data.home});
  make(top, "h1", visible(data.card.title));
  make(top, "span", state, "badge " + state, {id: "badge"});
  const nav = make(top, "nav", undefined, "", {"aria-label": "sections of the page"});
  for (const [id, text] of SECTIONS) make(nav, "a", text, "", {href: "#" + id});
}

function stepSeconds() {
  const sums = exact().slice(-20).map(line => data.laps.reduce((sum, stage) => sum + (line[`time/${stage}_s`] || 0), 0));
  return sums.length ? sums.reduce((a, b) => a + b, 0) / sums.length : NaN;
}

function drawOverview(parent) {
  const card = make(parent, "div", undefined, "card"), facts = make(card, "dl", undefined, "facts");
  for (const [name, value] of Object.entries(data.card.facts)) {
    const pair = make(facts, "div");
    make(pair, "dt", visible(name)); make(pair, "dd", visible(value ?? "–"));
  }
  const step = data.status.step || 0, share = data.card.steps ? step / data.card.steps : 0, bar = make(card, "div", undefined, "bar");
  make(bar, "i").style.width = Math.min(100, 100 * share) + "%";
  make(card, "p", progressText(step), "small soft", {id: "progress"});
  if (data.status.message) make(card, "p", visible(data.status.message), "small");
  if (["finished", "stopped", "killed"].includes(data.status.state)) make(card, "p", endText(), "small", {id: "ending"});
  drawStats(make(parent, "div", undefined, "grid stats", {style: "margin-top:12px"}));
}

function progressText(step) {
  const left = data.card.steps - step, seconds = stepSeconds(), parts = [`step ${step} of ${data.card.steps}`];
  if (Number.isFinite(seconds)) parts.push(`${duration(seconds)} per step`);
  if (data.status.state === "running" && left > 0 && Number.isFinite(seconds)) parts.push(`about ${duration(left * seconds)} left`);
  parts.push((data.live ? "live, " : "") + `written ${new Date(data.written * 1000).toLocaleString()}`);
  return parts.join(" · ");
}

function endText() {
  const folder = data.card.folder, first = data.evals[0], last = data.evals.at(-1), parts = [];
  if (first && last !== first && Number.isFinite(last["eval/accuracy"])) parts.push(`Held-out accuracy ${show(first["eval/accuracy"])} before, ${show(last["eval/accuracy"])} after.`);
  parts.push(data.status.state === "finished" ? `The trained model is in ${folder}/final; export it with: podium export ${folder} OUT` : `Continue with: podium resume ${folder}`);
  return visible(parts.join(" "));
}

function drawStats(parent) {
  const format = Object.keys(data.series.columns).find(name => /^reward\/(?!kept_).*format.*_mean$/.test(name));
  const stats = [["mean reward", "reward/mean"], ["correct rollouts", "reward/correct_rate"], ["format rate", format], ["loss", "loss/total"], ["entropy", "policy/entropy"], ["answer length", "rollout/length_mean"], ["groups with signal", "batch/kept_ratio"], ["policy version", "version/policy"]];
  for (const [label, metric] of stats) {
    if (!metric || (!(metric in data.series.columns) && data.series.steps.length)) continue;
    const lines = exact(), now = (lines.at(-1) || {})[metric], before = (lines.at(-2) || {})[metric];
    const card = make(parent, "div", undefined, "card");
    term(card, label, metric).classList.add("soft", "small");
    make(card, "b", show(now));
    make(card, "span", Number.isFinite(now) && Number.isFinite(before) ? change(now - before) + " since last step" : "\u00a0", "soft small");
    sparkline(card, (data.series.columns[metric] || {mean: []}).mean, "var(--c0)");
  }
  const first = data.evals[0], last = data.evals.at(-1);
  if (!last || !Number.isFinite(last["eval/accuracy"])) return;
  const card = make(null, "div", undefined, "card");
  parent.insertBefore(card, parent.children[2] || null);
  term(card, "held-out accuracy", "eval/accuracy").classList.add("soft", "small");
  make(card, "b", show(last["eval/accuracy"]));
  make(card, "span", change(last["eval/accuracy"] - first["eval/accuracy"]) + " since the start", "soft small");
  sparkline(card, data.evals.map(line => line["eval/accuracy"]), "var(--c1)");
}
const change = by => (by >= 0 ? "+" : "−") + show(Math.abs(by));

function drawCharts(parent) {
  const controls = make(parent, "div", undefined, "controls"), grid = make(parent, "div", undefined, "grid charts");
  const smooth = field(controls, "smoothing", "smooth", "range", () => drawn.forEach(draw => draw()), {min: 0, max: 0.95, step: 0.05});
  smooth.setAttribute("aria-label", "smoothing of the curves");
  if (data.series.stride > 1) make(controls, "p", `A point stands for ${data.series.stride} steps: the line is their mean, the band their range.`, "small soft");
  const used = new Set(), names = Object.keys(data.series.columns);
  const curves = (...pairs) => pairs.map(([metric, label, extra]) => { used.add(metric); return curveOf(metric, label, extra); });
  const optional = {optional: true};
  const verifiers = names.filter(name => /^reward\/(?!kept_).*_mean$/.test(name));
  chart(grid, "Reward and correctness", [...curves(["reward/mean", "mean reward"], ["reward/correct_rate", "correct rollouts"]), evalCurve("eval/accuracy", "held-out accuracy")]);
  if (verifiers.length > 1) chart(grid, "Reward by verifier", curves(...verifiers.map(name => [name, name.slice(7, -5)])));
  chart(grid, "Loss", curves(["loss/total", "loss"], ["loss/kl", "KL term", optional]));
  chart(grid, "KL to the reference", curves(["kl/k1", "k1"], ["kl/k2", "k2"], ["kl/k3", "k3"]));
  chart(grid, "Entropy of the policy", curves(["policy/entropy", "entropy, nats"]));
  chart(grid, "Length of answers", curves(["rollout/length_mean", "mean"], ["rollout/length_max", "longest"]));
  chart(grid, "Sampler and trainer", curves(["mismatch/abs_mean", "mean |logprob difference|"], ["mismatch/outside_share", "share of tokens off by a tenth", optional], ["mismatch/masked_share", "share of tokens removed", optional]));
  chart(grid, "Throughput, tokens per second", curves(["rollout/tokens_per_s", "generated"], ["perf/train_tokens_per_s", "trained"]));
  chart(grid, "Groups with signal", curves(["batch/kept_ratio", "share trained"]));
  chart(grid, "How answers end", curves(["rollout/stop_rate", "stop token"], ["rollout/truncated_share", "truncated"]));
  chart(grid, "Gradient norm", curves(["optim/grad_norm", "before clipping"]));
  chart(grid, "Clipped tokens", curves(["loss/clipped_low_share", "low", optional], ["loss/clipped_high_share", "high", optional]));
  chart(grid, "Staleness, updates", curves(["version/lag_max", "oldest rollout", optional], ["version/lag_mean", "mean", optional]));
  chart(grid, "Queues", curves(...names.filter(name => name.startsWith("queue/")).map(name => [name, name.slice(6).replaceAll("_", " ")])));
  const rest = names.filter(name => !used.has(name) && !verifiers.includes(name));
  const more = make(parent, "details");
  more.open = ui.more;
  make(more, "summary", `${rest.length} more metrics`);
  const place = make(more, "div", undefined, "grid charts");
  const fill = () => { for (const name of rest) chart(place, name, [curveOf(name, name)]); };
  if (ui.more) fill();
  more.addEventListener("toggle", () => { if (more.open !== ui.more) { ui.more = more.open; redrawAll(); } });
}

const STAGE_COLOURS = {rollout: "var(--c0)", train: "var(--c1)", sync: "var(--c2)", eval: "var(--c3)", checkpoint: "var(--c4)", report: "var(--c5)", pack: "var(--c6)", reward: "var(--c7)"};

function drawTimeline(parent) {
  const grid = make(parent, "div", undefined, "grid");
  const order = ["rollout", "pack", "train", ...data.laps.filter(stage => !["rollout", "pack", "train"].includes(stage))];
  const stages = order.map(stage => curveOf(`time/${stage}_s`, stage, {optional: true, colour: STAGE_COLOURS[stage]})).filter(Boolean).map(({low, high, ...curve}) => curve);
  chart(grid, "Seconds per step, by stage", stages, {stacked: true, height: 210});
  const lines = exact();
  if (!lines.length) return;
  const card = make(grid, "div", undefined, "card"), head = make(card, "div", undefined, "charthead"), count = 6;
  make(head, "h3", "Timeline of the last steps");
  const label = make(head, "label", "up to step ", "small soft", {style: "margin-left:auto"}), slider = make(label, "input", undefined, "", {type: "range", id: "pick-window", min: Math.min(count, lines.length), max: lines.length, "aria-label": "last step of the timeline"}), shown = make(label, "span");
  slider.value = ui.window || lines.length;
  const figure = make(card, "div");
  const draw = () => { const end = +slider.value; shown.textContent = " " + lines[end - 1].step; lanes(figure, lines.slice(Math.max(0, end - count), end)); };
  slider.addEventListener("input", () => { ui.window = +slider.value === lines.length ? 0 : +slider.value; keep(); draw(); });
  drawn.push(draw);
  if (data.moments.length) {
    const clock = make(grid, "div", undefined, "card", {id: "clock"});
    make(make(clock, "div", undefined, "charthead"), "h3", "Wall clock: what happened at the same time");
    const place = make(clock, "div");
    drawn.push(() => momentLanes(place, data.moments));
  }
  make(card, "p", "Rewards are computed during generation; their lane shows the sum over all workers. Sync, evaluation and commit follow a step's report, so they appear before the next step's rollouts.", "small soft");
}

// Wall-clock lanes of the last events: what was sampled, trained and pushed at the same time, and when each group
// arrived. Events that name an engine or a worker have lanes of their own.
function momentLanes(figure, moments) {
  const spans = [], waiting = {}, laneOf = (name, event) => [name, event.engine ?? event.worker].filter(part => part !== undefined).join(" ");
  for (const event of moments) {
    if (event.event === "sampling") (waiting[laneOf("", event)] ||= []).push({start: event.time, left: event.ordinals || 1});
    else if (event.event === "group") {
      spans.push({lane: laneOf("groups", event), start: event.time, end: event.time, text: `group of prompt ${event.ordinal}`});
      const open = (waiting[laneOf("", event)] || [])[0];
      if (open && --open.left === 0) { spans.push({lane: laneOf("sampling", event), start: open.start, end: event.time, text: "sampling"}); waiting[laneOf("", event)].shift(); }
    } else if (event.event === "trained") spans.push({lane: laneOf("training", event), start: event.time - event.seconds, end: event.time, text: event.updated ? "training" : "training, without an update"});
    else if (event.event === "pushed") spans.push({lane: laneOf("push", event), start: event.time - event.seconds, end: event.time, text: `weights of version ${event.policy_version}, by ${event.channel}`});
    else if (event.event === "committed") spans.push({lane: "commit", start: event.time, end: event.time, text: `commit at step ${event.step}`});
  }
  figure.textContent = "";
  if (!spans.length) return;
  const colours = {sampling: "var(--c0)", groups: "var(--c6)", training: "var(--c1)", push: "var(--c2)", commit: "var(--c4)"}, first = Object.keys(colours);
  const rows = [...new Set(spans.map(span => span.lane))].sort((a, b) => first.indexOf(a.split(" ")[0]) - first.indexOf(b.split(" ")[0]) || (a < b ? -1 : 1));
  const [from] = extent(spans.map(span => span.start)), [, to] = extent(spans.map(span => span.end));
  const width = Math.max(260, figure.clientWidth), left = 88, tall = 22, height = rows.length * tall + 24, length = Math.max(to - from, 1e-9), X = time => left + (time - from) / length * (width - left - 10);
  const root = svg(figure, "svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `the last ${duration(length)} by the clock`});
  rows.forEach((lane, row) => {
    svg(root, "text", {x: 0, y: row * tall + 15}, visible(lane));
    svg(root, "line", {x1: left, x2: width - 10, y1: (row + 1) * tall - 1, y2: (row + 1) * tall - 1, stroke: "var(--grid)"});
  });
  for (const span of spans) {
    const bar = svg(root, "rect", {class: "moment", x: X(span.start), y: rows.indexOf(span.lane) * tall + 4, width: Math.max(1.5, X(span.end) - X(span.start)), height: tall - 9, rx: 1.5, fill: colours[span.lane.split(" ")[0]], opacity: 0.8});
    bar.dataset.tip = `${visible(span.text)}\n` + (span.end > span.start ? duration(span.end - span.start) + ", " : "") + `until ${duration(to - span.end)} before the last event`;
  }
  for (const second of ticks(0, length, Math.max(2, width / 130))) svg(root, "text", {x: X(from + second), y: height - 4, "text-anchor": "middle"}, show(second) + " s");
}

// One lane per stage. The laps of a step follow each other; all other stages overlap its rollouts.
function lanes(figure, lines) {
  figure.textContent = "";
  const beside = [...new Set(lines.flatMap(line => Object.keys(line)))].filter(name => /^time\/.*_s$/.test(name)).map(name => name.slice(5, -2)).filter(stage => !data.laps.includes(stage) && !/waits|overlapped/.test(stage));
  const has = stage => lines.some(line => line[`time/${stage}_s`] > 0);
  const rows = [...["rollout", ...beside, "pack", "train", "report", "sync", "eval", "checkpoint"], ...data.laps].filter((stage, index, all) => all.indexOf(stage) === index && has(stage));
  const width = Math.max(260, figure.clientWidth), left = 88, tall = 22, height = rows.length * tall + 24;
  const spans = [];
  let now = 0;
  for (const line of lines) {
    let rolloutAt = now;
    for (const stage of data.laps) {
      const seconds = line[`time/${stage}_s`] || 0;
      if (stage === "rollout") rolloutAt = now;
      if (seconds) spans.push({stage, step: line.step, start: now, seconds});
      now += seconds;
    }
    for (const stage of beside) if (line[`time/${stage}_s`] > 0) spans.push({stage, step: line.step, start: rolloutAt, seconds: line[`time/${stage}_s`], beside: true});
    spans.push({stage: null, step: line.step, start: now});
  }
  const end = Math.max(now, 1e-9), X = seconds => left + Math.min(1, seconds / end) * (width - left - 10);
  const root = svg(figure, "svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `timeline of steps ${lines[0].step} to ${lines.at(-1).step}, ${duration(end)} in all`});
  rows.forEach((stage, row) => {
    svg(root, "text", {x: 0, y: row * tall + 15}, stage.replaceAll("_", " "));
    svg(root, "line", {x1: left, x2: width - 10, y1: (row + 1) * tall - 1, y2: (row + 1) * tall - 1, stroke: "var(--grid)"});
  });
  for (const span of spans) {
    if (span.stage === null) { svg(root, "line", {x1: X(span.start), x2: X(span.start), y1: 0, y2: height - 18, stroke: "var(--soft)", "stroke-dasharray": "2 4"}); continue; }
    const row = rows.indexOf(span.stage), bar = svg(root, "rect", {class: "span", x: X(span.start), y: row * tall + 4, width: Math.max(1, X(span.start + span.seconds) - X(span.start)), height: tall - 9, rx: 2, fill: STAGE_COLOURS[span.stage] || "var(--c7)", opacity: span.beside ? 0.6 : 0.9});
    bar.dataset.tip = `step ${span.step}, ${span.stage}: ${duration(span.seconds)}` + (span.beside ? " in total, overlapping the rest" : "");
  }
  for (const second of ticks(0, end, Math.max(2, width / 130))) svg(root, "text", {x: X(second), y: height - 4, "text-anchor": "middle"}, show(second) + " s");
}

const COLUMNS = ["reward/mean", "reward/correct_rate", "batch/kept_ratio", "loss/total", "kl/k3", "policy/entropy", "rollout/length_mean", "rollout/truncated_share", "mismatch/abs_mean", "optim/grad_norm", "optim/lr", "version/policy", "version/lag_max", "rollout/tokens_per_s", "time/rollout_s", "time/train_s"];

function drawTable(parent) {
  const lines = exact().slice().reverse(), columns = COLUMNS.filter(name => name in data.series.columns || !data.series.steps.length);
  const table = make(make(parent, "div", undefined, "scroll card", {tabindex: 0, "aria-label": "table of steps"}), "table", undefined, "", {id: "steps-table"});
  const head = make(make(table, "thead"), "tr"), body = make(table, "tbody");
  make(head, "th", "step");
  for (const name of columns) term(head, name, name, "th");
  for (const line of lines.slice(0, ui.rows)) {
    const row = make(body, "tr"), cell = make(row, "td");
    button(cell, String(line.step), () => { ui.step = String(line.step); ui.selected = ""; keep(); drawPage(); byId("rollouts").scrollIntoView(); }, "plain", {title: "show its rollouts"});
    for (const name of columns) make(row, "td", show(line[name]));
  }
  if (lines.length > ui.rows) button(parent, `show more of ${lines.length} steps`, () => { ui.rows += 100; redrawAll(); });
  if (data.recent.length) make(parent, "p", `The last ${data.recent.length} steps; every step is in metrics.jsonl.`, "small soft");
}

function drawHealth(parent) {
  const grid = make(parent, "div", undefined, "grid verdicts");
  for (const verdict of data.health) {
    const card = make(grid, "div", undefined, "card verdict " + verdict.level);
    make(card, "h3", visible(verdict.title));
    make(card, "p", visible(plain(verdict.text)), "small");
    if (verdict.advice) make(card, "p", visible(plain(verdict.advice)), "small advice");
  }
  if (!data.health.length) make(parent, "p", "No data yet.", "soft");
  if (!data.events.length) return;
  const box = make(parent, "details", undefined, "", {style: "margin-top:12px"});
  make(box, "summary", `${data.events.length} events`);
  const body = make(make(make(box, "div", undefined, "scroll"), "table", undefined, "left wrap"), "tbody");
  for (const {time, event, ...rest} of data.events.slice().reverse()) {
    const row = make(body, "tr");
    make(row, "td", new Date(time * 1000).toLocaleString()); make(row, "td", visible(event)); make(row, "td", visible(JSON.stringify(rest)));
  }
}
