"use strict";
(() => {
  const data = JSON.parse(document.getElementById("turns-data").textContent);
  const table = document.getElementById("turns-body");
  const said = document.getElementById("turns-said");
  const pages = document.getElementById("turns-pages");
  const boxes = Array.from(document.querySelectorAll("input[data-outcome]"));
  const words = document.getElementById("turns-words");
  const SIZE = 100;
  let rows = [], page = 0;

  const seconds = ms => ms === null ? "-" : (ms / 1000).toFixed(ms < 1000 ? 3 : 2);
  const cell = (row, text, kind) => {
    const made = row.insertCell();
    made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };

  function choose() {
    const on = new Set(boxes.filter(box => box.checked).map(box => box.dataset.outcome));
    const looked = words.value.trim().toLowerCase();
    rows = [];
    for (let n = 0; n < data.turn.length; n++) {
      const name = data.outcomes[data.outcome[n]];
      if (!on.has(name)) continue;
      if (looked && !(`c${data.conversation[n]} t${data.turn[n]} ${name} ${data.why[n] || ""}`.toLowerCase().includes(looked))) continue;
      rows.push(n);
    }
    for (const mark of document.querySelectorAll("#timeline [data-outcome]"))
      mark.classList.toggle("off", !on.has(mark.dataset.outcome));
    page = 0;
    draw();
  }

  function draw() {
    const last = Math.max(0, Math.ceil(rows.length / SIZE) - 1);
    page = Math.min(Math.max(page, 0), last);
    table.replaceChildren();
    for (const n of rows.slice(page * SIZE, (page + 1) * SIZE)) {
      const row = table.insertRow();
      const name = data.outcomes[data.outcome[n]];
      cell(row, data.turn[n], "number");
      cell(row, data.conversation[n], "number");
      cell(row, name, name === "ok" ? "ok" : "bad");
      cell(row, data.at[n].toFixed(1), "number");
      cell(row, seconds(data.ttft_ms[n]), "number");
      cell(row, seconds(data.ms[n]), "number");
      cell(row, data.rate[n] === null ? "-" : data.rate[n], "number");
      cell(row, data.context[n].toLocaleString("en"), "number");
      cell(row, data.output[n], "number");
      cell(row, data.why[n] || "", "wide");
    }
    const from = rows.length ? page * SIZE + 1 : 0;
    said.textContent = `${from} to ${Math.min(rows.length, (page + 1) * SIZE)} of ${rows.length} shown; ${data.turn.length} turns in all`;
    pages.hidden = last === 0;
    pages.querySelector("[data-step='-1']").disabled = page === 0;
    pages.querySelector("[data-step='1']").disabled = page === last;
  }

  for (const box of boxes) box.addEventListener("change", choose);
  words.addEventListener("input", choose);
  for (const button of pages.querySelectorAll("button"))
    button.addEventListener("click", () => { page += Number(button.dataset.step); draw(); });
  for (const link of document.querySelectorAll("a[href^='#fault-']"))
    link.addEventListener("click", () => {
      const found = document.querySelector(link.getAttribute("href"));
      if (found) found.open = true;
    });
  document.getElementById("turns-tools").hidden = false;
  document.getElementById("turns-static").hidden = true;
  document.getElementById("turns-table").hidden = false;
  choose();
})();
