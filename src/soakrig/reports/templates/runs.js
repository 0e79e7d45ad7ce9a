"use strict";
(() => {
  const POLL_MS = 3000;
  const table = document.getElementById("runs");
  const boxes = Array.from(document.querySelectorAll("input[name='run']"));
  const button = document.getElementById("compare-button");

  function choose() {
    const on = boxes.filter(box => box.checked).length;
    button.disabled = on !== 2;
    document.getElementById("compare-said").textContent = on === 2 ? "" : `${on} of 2 checked`;
  }
  if (button) {
    for (const box of boxes) box.addEventListener("change", choose);
    addEventListener("pageshow", choose);
    choose();
  }
  for (const select of document.querySelectorAll("select"))
    select.addEventListener("change", () => select.form.requestSubmit());

  async function poll() {
    try {
      const answer = await fetch("/changes", {cache: "no-store"});
      if (!answer.ok) return;
      const now = await answer.json();
      document.getElementById("changed").hidden = now.mark === (table ? table.dataset.mark : "");
      for (const row of document.querySelectorAll("tr[data-id]")) {
        const live = now.running[row.dataset.id];
        if (!live) continue;
        row.querySelector("[data-live='faults']").textContent = live.faults;
        row.querySelector("[data-live='turns']").textContent = live.turns.toLocaleString("en");
      }
    } catch (error) {
      return;
    }
    setTimeout(poll, POLL_MS);
  }
  poll();
})();
