"use strict";
// Sorting and filtering of tables, switching of variants, theme, enlarged figures and their values.
// Without scripts the page shows everything.
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
document.getElementById("theme").addEventListener("click", () => {
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  root.dataset.theme = isDark ? "light" : "dark";
});

// The first number of a cell, with a typographic minus; text sorts after numbers.
function sortKey(cell) {
  const text = cell.textContent.replaceAll("\u2212", "-").replaceAll(",", "");
  const number = text.match(/^[<\u00b1 ]*([+-]?\d+(\.\d+)?(e[+-]?\d+)?)/);
  return number ? Number(number[1]) : text.trim() === "\u2014" ? null : text;
}

function compare(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return typeof a === "number" ? a - b : a.localeCompare(b);
}

// The entries of a table: bodies of one row, or of rows that belong together. A body of the class
// "group" has the name of the entries below it.
function findEntries(table) {
  let group = null;
  return [...table.tBodies].map((body) => {
    if (body.className === "group") group = body;
    return { body, group, name: body.rows[0].cells[0].firstChild?.textContent ?? "" };
  });
}

// Sort the entries of each group by their first rows.
function sortEntries(table, column, heading) {
  const direction = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", direction);
  const sign = direction === "ascending" ? 1 : -1;
  const entries = findEntries(table);
  for (const group of new Set(entries.map((entry) => entry.group))) {
    const inside = entries.filter((entry) => entry.group === group && entry.body !== group);
    // A row with merged cells has fewer cells than the table has columns.
    const cells = ({ rows: [row] }) => row.cells[column] ?? row.lastElementChild;
    const sorted = inside.map(({ body }) => [sortKey(cells(body)), body]);
    sorted.sort(([a], [b]) => (a === null || b === null ? compare(a, b) : sign * compare(a, b)));
    table.append(...(group ? [group] : []), ...sorted.map(([, body]) => body));
  }
}

const hidden = new Set();
function showRows() {
  for (const table of document.querySelectorAll("table")) {
    const words = (table.filter?.value ?? "").toLowerCase().split(/\s+/);
    for (const { body, group, name } of findEntries(table)) {
      const text = `${group?.textContent ?? ""} ${body.textContent}`.toLowerCase();
      body.hidden = hidden.has(name) || body === group || !words.every((word) => text.includes(word));
      if (group && !body.hidden) group.hidden = false;
    }
  }
  for (const { group, name } of artists) group.style.display = hidden.has(name) ? "none" : "";
}

for (const table of document.querySelectorAll("table")) {
  [...table.tHead.lastElementChild.cells].forEach((heading, column) => {
    heading.tabIndex = 0;
    heading.addEventListener("click", () => sortEntries(table, column, heading));
    heading.addEventListener("keydown", (event) => {
      if (event.key === "Enter") sortEntries(table, column, heading);
    });
  });
  if (table.tBodies.length > 5) {
    table.filter = document.createElement("input");
    table.filter.type = "search";
    table.filter.placeholder = "filter rows";
    table.filter.addEventListener("input", showRows);
    table.parentElement.before(table.filter);
  }
}

const results = document.querySelector("table.results");
const panel = document.getElementById("variants");
if (results && results.tBodies.length > 2) {
  panel.hidden = false;
  for (const { name } of findEntries(results)) {
    const label = document.createElement("label");
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = true;
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(name);
      else hidden.add(name);
      showRows();
    });
    label.append(box, name);
    panel.append(label);
  }
}

// Curves and dots have a JSON list as their id: the name, and the text of each point.
const artists = [];
for (const group of document.querySelectorAll(".drawing g[id^='[']")) {
  const [name, ...texts] = JSON.parse(group.id);
  artists.push({ group, name, texts });
}

// The points of a group in the coordinates of its drawing: markers, or the vertices of a line.
function findPoints(group) {
  const marks = [...group.querySelectorAll("use")];
  if (marks.length) return marks.map((mark) => [mark.x.baseVal.value, mark.y.baseVal.value]);
  const numbers = group.querySelector("path")?.getAttribute("d")?.match(/-?[\d.]+/g) ?? [];
  return numbers.flatMap((x, i) => (i % 2 ? [] : [[Number(x), Number(numbers[i + 1])]]));
}

const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);
for (const drawing of document.querySelectorAll(".drawing")) {
  drawing.addEventListener("click", () => {
    drawing.classList.toggle("enlarged");
    tip.hidden = true;
  });
  drawing.addEventListener("mouseleave", () => { tip.hidden = true; });
  drawing.addEventListener("mousemove", (event) => {
    let nearest = 16;
    tip.hidden = true;
    for (const { group, name, texts } of artists) {
      if (!texts.length || !drawing.contains(group) || group.style.display) continue;
      const matrix = group.getScreenCTM();
      findPoints(group).slice(0, texts.length).forEach(([x, y], i) => {
        const point = new DOMPoint(x, y).matrixTransform(matrix);
        const distance = Math.hypot(point.x - event.clientX, point.y - event.clientY);
        if (distance >= nearest) return;
        nearest = distance;
        tip.hidden = false;
        tip.textContent = `${name}: ${texts[i]}`;
        tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
        tip.style.top = `${event.clientY + 14}px`;
      });
    }
  });
}
