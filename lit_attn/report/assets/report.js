"use strict";
// Switching of variants, theme, enlarged figures and their values; DataTables sorts and filters the
// tables. Without scripts the page shows everything.
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
document.getElementById("theme").addEventListener("click", () => {
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  root.dataset.theme = isDark ? "light" : "dark";
});

// The text of a cell.
function plain(html) {
  const cell = document.createElement("template");
  cell.innerHTML = html;
  return cell.content.textContent.trim();
}

// Cells are sorted by their first number, with a typographic minus. Text comes after numbers, and an
// empty cell is last in both directions.
function sortKey(html) {
  const text = plain(html).replaceAll("\u2212", "-").replaceAll(",", "");
  const number = text.match(/^[<\u00b1 ]*([+-]?\d+(\.\d+)?(e[+-]?\d+)?)/);
  return number ? [0, Number(number[1])] : [text === "\u2014" || text === "" ? 2 : 1, text];
}

function compare([kind, a], [other, b], sign) {
  if (kind !== other) return kind > 1 || other > 1 ? kind - other : sign * (kind - other);
  return sign * (kind ? a.localeCompare(b) : a - b);
}

DataTable.type("first-number", {
  className: "",
  order: { pre: sortKey, asc: (a, b) => compare(a, b, 1), desc: (a, b) => compare(a, b, -1) },
  search: plain,
});

// Tables of a paper stay in the order in which they were printed.
const hidden = new Set();
const tables = [...document.querySelectorAll("table:not(.paper)")].map((table) => {
  const columnDefs = [{ targets: "_all", type: "first-number", orderSequence: ["asc", "desc"] }];
  const layout = { topStart: null, topEnd: null, bottomStart: null, bottomEnd: null };
  const api = new DataTable(table, { paging: false, autoWidth: false, order: [], layout, columnDefs });
  api.search.fixed("variants", (_, [name]) => !hidden.has(plain(name)));
  if (table.dataset.view) {
    const button = document.createElement("button");
    const label = () => table.classList.contains("brief") ? "show all columns" : "show fewer columns";
    button.type = "button";
    button.className = "columns";
    table.classList.add("brief");
    button.textContent = label();
    button.addEventListener("click", () => {
      table.classList.toggle("brief");
      button.textContent = label();
    });
    table.closest(".wide").before(button);
  }
  if (api.rows().count() > 5) {
    const box = document.createElement("input");
    box.type = "search";
    box.placeholder = "filter rows";
    box.addEventListener("input", () => api.search(box.value).draw());
    table.closest(".wide").before(box);
  }
  return api;
});

// Blocks of a table share their first rows.
const names = new Set();
for (const results of document.querySelectorAll("table.results")) {
  for (const row of results.tBodies[0].rows) names.add(row.cells[0].textContent);
}
const panel = document.getElementById("variants");
if (names.size > 2) {
  panel.hidden = false;
  for (const name of names) {
    const label = document.createElement("label");
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = true;
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(name);
      else hidden.add(name);
      for (const api of tables) api.draw();
      for (const { group, name } of artists) group.style.display = hidden.has(name) ? "none" : "";
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
