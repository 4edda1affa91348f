"use strict";
// Filters, keys and colours. All that is said stands in the page already.
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const byId = (id) => document.getElementById(id);
  const root = document.documentElement;
  const find = byId("find"), release = byId("release"), form = document.querySelector(".filters");
  const chips = all(".chip"), rows = all(".grid tbody tr"), entries = all(".entry");
  const table = document.querySelector(".grid");
  root.classList.add("script");

  // Colours: the choice is kept where the browser lets a page keep anything.
  const key = "drift-audit-theme";
  const stored = () => { try { return localStorage.getItem(key) || ""; } catch { return ""; } };
  const setTheme = (value) => {
    if (value) root.dataset.theme = value; else delete root.dataset.theme;
    try { if (value) localStorage.setItem(key, value); else localStorage.removeItem(key); } catch { /* kept for this view */ }
  };
  for (const radio of all("input[name=theme]")) {
    radio.checked = radio.value === stored();
    radio.addEventListener("change", () => setTheme(radio.value));
  }
  setTheme(stored());

  // Filters.
  const entryOf = (cell) => byId(cell.dataset.entry);
  const texts = new Map(entries.map((entry) => [entry, entry.textContent.toLowerCase()]));
  const apply = () => {
    const words = new Set(chips.filter((c) => c.getAttribute("aria-pressed") === "true").map((c) => c.dataset.word));
    const query = find.value.trim().toLowerCase();
    const column = release.value;
    const inColumn = (element) => column === "" || element.dataset.column === column;
    for (const element of all("[data-column]")) element.hidden = !inColumn(element);
    let shown = 0;
    for (const row of rows) {
      const head = row.querySelector("th");
      const named = !query || `${head.textContent} ${head.title}`.toLowerCase().includes(query);
      let any = false;
      for (const cell of all("td", row)) {
        const entry = entryOf(cell);
        const fits = inColumn(cell) && (words.size === 0 || words.has(cell.dataset.word)) && (named || texts.get(entry).includes(query));
        cell.classList.toggle("off", !fits);
        entry.classList.toggle("unmatched", !fits);
        if (words.size || query) entry.classList.toggle("asked", fits && entry.hasAttribute("data-quiet"));
        else if (!entry.open) entry.classList.remove("asked");
        any ||= fits;
      }
      row.hidden = !any;
      shown += any;
    }
    for (const section of all(".release")) {
      const some = all(".entry", section).some((entry) => !entry.classList.contains("unmatched") && (!entry.hasAttribute("data-quiet") || entry.classList.contains("asked")));
      section.classList.toggle("busy", some);
      section.classList.toggle("unmatched", !some && Boolean(words.size || query));
    }
    document.querySelector(".none").hidden = shown > 0;
    const columns = release.options.length - 1;
    byId("status").textContent = `${shown} of ${rows.length} patches, ${column === "" ? columns : 1} of ${columns} releases`;
    settle();
  };
  for (const chip of chips) {
    chip.addEventListener("click", () => {
      chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
      apply();
    });
  }
  find.addEventListener("input", apply);
  release.addEventListener("change", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();  // the fields would be empty only after it
    for (const chip of chips) chip.setAttribute("aria-pressed", "false");
    find.value = "";
    release.selectedIndex = 0;
    apply();
  });

  // One cell of the grid is in the tab order; arrows move on from it.
  const lines = () => rows.filter((row) => !row.hidden)
    .map((row) => all("td", row).filter((cell) => !cell.hidden && !cell.classList.contains("off")).map((cell) => cell.querySelector("a")));
  let current = null;
  const settle = () => {
    const cells = lines().flat();
    if (!cells.includes(current)) current = cells[0] || null;
    for (const link of all(".cell")) link.tabIndex = link === current ? 0 : -1;
  };
  const go = (link) => {
    if (!link) return;
    current = link;
    settle();
    link.focus();
    link.scrollIntoView({ block: "nearest", inline: "nearest" });
  };
  const columnOf = (link) => Number(link.parentElement.dataset.column);
  const near = (line, wanted) => line.reduce((best, link) => Math.abs(columnOf(link) - wanted) < Math.abs(columnOf(best) - wanted) ? link : best, line[0]);
  const step = (name, link) => {
    const grid = lines();
    const y = grid.findIndex((line) => line.includes(link)), line = grid[y], x = line.indexOf(link);
    if (name === "ArrowRight") return line[x + 1];
    if (name === "ArrowLeft") return line[x - 1];
    if (name === "Home") return line[0];
    if (name === "End") return line[line.length - 1];
    if (name === "ArrowDown" || name === "ArrowUp") {
      const other = grid[y + (name === "ArrowDown" ? 1 : -1)];
      return other && near(other, columnOf(link));
    }
    const needy = grid.flat().filter((one) => one.matches(".look, .broken") || one === link);
    const at = needy.indexOf(link) + (name === "n" ? 1 : -1);
    return needy[(at + needy.length) % needy.length];
  };
  table.addEventListener("keydown", (event) => {
    const link = event.target.closest(".cell");
    const known = ["ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown", "Home", "End", "n", "p"];
    if (!link || event.ctrlKey || event.metaKey || event.altKey || !known.includes(event.key)) return;
    event.preventDefault();
    go(step(event.key, link));
  });
  table.addEventListener("focusin", (event) => {
    const link = event.target.closest(".cell");
    if (link && link !== current) { current = link; settle(); }
  });

  // A cell shows its evidence, and Escape leads back.
  const show = (entry) => {
    entry.classList.add("asked");
    entry.classList.remove("unmatched");
    entry.closest(".release").classList.add("busy");
    entry.open = true;
    for (const other of all(".here")) other.classList.remove("here");
    byId(entry.dataset.cell).classList.add("here");
    entry.querySelector("summary").focus({ preventScroll: true });
    entry.scrollIntoView({ block: "start" });
  };
  const follow = () => {
    const target = location.hash && byId(location.hash.slice(1));
    if (target && target.matches(".entry")) show(target);
  };
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a.cell, .back a");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const target = byId(link.hash.slice(1));
    try { history.replaceState(null, "", link.hash); } catch { /* a page inside a frame */ }
    if (target.matches(".entry")) show(target); else go(target);
  });
  document.addEventListener("keydown", (event) => {
    const entry = event.target.closest && event.target.closest(".entry");
    if (event.key === "Escape" && entry) go(byId(entry.dataset.cell));
    else if (event.key === "Escape" && event.target === find && find.value) { find.value = ""; apply(); }
    else if (event.key === "/" && !event.ctrlKey && !event.metaKey && !event.target.matches("input, select, textarea")) {
      event.preventDefault();
      find.focus();
    }
  });
  const visibleEntries = () => entries.filter((entry) => entry.offsetParent !== null);
  byId("open").addEventListener("click", () => { for (const entry of visibleEntries()) entry.open = true; });
  byId("close").addEventListener("click", () => { for (const entry of visibleEntries()) entry.open = false; });
  addEventListener("hashchange", follow);
  apply();
  follow();
})();
