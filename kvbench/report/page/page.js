(() => {
  "use strict";
  const root = document.documentElement;
  const field = document.getElementById("filter");
  const found = document.getElementById("found");
  const tip = document.getElementById("tip");
  const rows = [], boxes = [];

  // Texts are read once: a filter of 500 cases then answers within a frame.
  for (const row of document.querySelectorAll("table.filtered tbody tr")) {
    const article = row.closest("article");
    rows.push({ row, text: `${article ? article.dataset.words : ""} ${row.textContent}`.toLowerCase() });
  }
  const figures = [...document.querySelectorAll("figure")].map((box) => ({ box, text: box.dataset.words.toLowerCase() }));
  for (const box of document.querySelectorAll("main article, main > section[id^='suite-']")) boxes.unshift(box);

  function filter() {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = (text) => words.every((word) => text.includes(word));
    let shown = 0;
    for (const { row, text } of rows) {
      row.hidden = !matches(text);
      if (!row.hidden) shown += 1;
    }
    for (const { box, text } of figures) box.hidden = !matches(text);
    for (const box of boxes) {
      box.hidden = words.length > 0 && !box.querySelector("tbody tr:not([hidden]), figure:not([hidden])");
    }
    for (const table of document.querySelectorAll("table.filtered")) {
      table.hidden = words.length > 0 && !table.querySelector("tbody tr:not([hidden])");
    }
    found.textContent = words.length ? `${shown} of ${rows.length} rows` : "";
    hide();
  }

  let marked = null, pointed = false;  // pointed: the mouse put the tip there, and takes it away
  function hide() {
    pointed = false;
    tip.hidden = true;
    if (marked) marked.classList.remove("at");
    marked = null;
  }
  function show(mark, x, y) {
    if (marked !== mark) {
      hide();
      marked = mark;
      mark.classList.add("at");
      tip.replaceChildren(...mark.getAttribute("aria-label").split(" \u00b7 ").map((part) => {
        const line = document.createElement("span");
        line.textContent = part;
        return line;
      }));
    }
    tip.hidden = false;
    const size = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - size.width - 4))}px`;
    tip.style.top = `${y + 16 + size.height > innerHeight ? Math.max(4, y - size.height - 10) : y + 16}px`;
  }

  const marksOf = (figure) => [...figure.querySelectorAll("svg [aria-label]")];
  function near(figure, x, y) {
    let best = null, least = 24;
    for (const mark of marksOf(figure)) {
      const box = mark.getBoundingClientRect();
      const dx = Math.max(box.left - x, 0, x - box.right), dy = Math.max(box.top - y, 0, y - box.bottom);
      const away = Math.hypot(dx, dy);
      if (away < least) { least = away; best = mark; }
    }
    return best;
  }
  document.addEventListener("pointermove", (event) => {
    const figure = event.target.closest ? event.target.closest("figure") : null;
    const mark = figure && near(figure, event.clientX, event.clientY);
    if (mark) {
      show(mark, event.clientX, event.clientY);
      pointed = true;
    } else if (pointed) hide();
  });
  document.addEventListener("scroll", hide, { passive: true });

  function step(figure, by) {
    const marks = marksOf(figure);
    if (!marks.length) return;
    const at = marks.indexOf(marked);
    const next = marks[at < 0 ? (by > 0 ? 0 : marks.length - 1) : (at + by + marks.length) % marks.length];
    const box = next.getBoundingClientRect();
    show(next, box.left + box.width / 2, box.top + box.height / 2);
  }
  function jump(by) {
    const visible = figures.map(({ box }) => box).filter((box) => box.offsetParent !== null);
    const at = visible.indexOf(document.activeElement);
    const next = visible[at < 0 ? (by > 0 ? 0 : visible.length - 1) : at + by];
    if (next) next.focus();
  }
  function theme() {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") {
      if (document.activeElement === field || field.value) { field.value = ""; filter(); }
      field.blur();
      hide();
      return;
    }
    if (event.target === field) return;
    const figure = event.target.closest ? event.target.closest("figure") : null;
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (figure && by) step(figure, by);
    else if (event.key === "/") field.focus();
    else if (event.key === "n") jump(1);
    else if (event.key === "p") jump(-1);
    else if (event.key === "t") theme();
    else return;
    event.preventDefault();
  });
  field.addEventListener("input", filter);
  document.getElementById("theme").addEventListener("click", theme);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
  filter();
  root.dataset.ready = "yes";
})();
