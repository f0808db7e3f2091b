// Draws the page, updates it, and handles keyboard shortcuts.

const SECTIONS = data.runs
  ? [["runs", "Runs"], ["curves", "Curves"], ["differences-part", "Settings"]]
  : [["overview", "Overview"], ["curves", "Curves"], ["timeline", "Timeline"], ["rollouts", "Rollouts"], ["steps", "Steps"], ["health", "Health"]];
const DRAW = data.runs
  ? {runs: drawRunsTable, curves: drawOverlays, "differences-part": drawDifferences}
  : {overview: drawOverview, curves: drawCharts, timeline: drawTimeline, rollouts: drawBrowser, steps: drawTable, health: drawHealth};

function drawPage() {
  const main = byId("main"), focus = document.activeElement && document.activeElement.id, list = document.querySelector(".list"), scrolled = list ? list.scrollTop : 0;
  main.style.minHeight = main.offsetHeight + "px";  // keeps the scroll position while the page is empty
  main.textContent = "";
  drawn.length = 0;
  (data.runs ? drawRunsHead : drawHead)();
  for (const [id, title] of SECTIONS) {
    const section = make(main, "section", undefined, "", {id, "aria-label": title});
    if (id !== "overview") make(section, "h2", title);
    DRAW[id](section);
  }
  make(main, "p", "Press ? for keyboard shortcuts.", "small soft");
  drawn.forEach(draw => draw());
  main.style.minHeight = "";
  if (focus && byId(focus)) byId(focus).focus({preventScroll: true});
  const fresh = document.querySelector(".list");
  if (fresh) fresh.scrollTop = scrolled;
}

let width = innerWidth, waiting;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(() => drawn.forEach(draw => draw()), 120);
});

const KEYS = {"1 … 6": "go to a section", "j, k": "next and previous rollout", "c": "change what the colours of the tokens mean", "/": "search rollouts", "← →": "move along the focused curve", "?": "show these keys"};
function help() {
  const box = make(document.body, "dialog", undefined, "", {"aria-label": "keyboard shortcuts"}), table = make(make(box, "table", undefined, "left"), "tbody");
  for (const [key, text] of Object.entries(KEYS)) { const row = make(table, "tr"); make(make(row, "td"), "kbd", key); make(row, "td", text); }
  button(box, "close", () => box.close());
  box.addEventListener("close", () => box.remove());
  box.showModal();
}
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || (event.target instanceof Element && event.target.closest("input, select, dialog"))) return;
  const section = SECTIONS[+event.key - 1];
  if (section) byId(section[0]).scrollIntoView();
  else if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "?") help();
  else if (event.key === "/" && byId("pick-search")) byId("pick-search").focus();
  else if (event.key === "c" && byId("pick-colour")) { const picker = byId("pick-colour"); picker.selectedIndex = (picker.selectedIndex + 1) % picker.options.length; picker.dispatchEvent(new Event("change")); }
  else return;
  event.preventDefault();
});

// Live: asks the server for new data. From disk: reloads the file, unless the user is typing or has selected text.
let seen = "";
async function refresh() {
  try {
    const answer = await fetch("data.json", {headers: seen ? {"If-None-Match": seen} : {}});
    if (answer.status === 200) {
      seen = answer.headers.get("ETag") || "";
      data = {...await answer.json(), live: true};
      drawPage();
    }
    document.body.dataset.connection = "live";
  } catch { document.body.dataset.connection = "lost"; }
  setTimeout(refresh, data.runs || data.status.state === "running" ? 2000 : 10000);
}
function reload() {
  const busy = document.hidden || String(getSelection()) || (document.activeElement && document.activeElement.closest("input, select, dialog, pre")) || document.querySelector("dialog[open]");
  if (busy) setTimeout(reload, 5000); else location.reload();
}

drawPage();
if (data.live) setTimeout(refresh, 1000);
else if (data.status.state === "running" && Date.now() / 1000 - data.written < 3600) setTimeout(reload, 5000);
