"use strict";
(() => {
  const box = document.getElementById("live");
  const put = (name, text) => { document.getElementById(`live-${name}`).textContent = text; };
  const POLL_MS = 1500, PATIENCE = 20;
  let failed = 0;

  function row(table, turn) {
    const made = table.insertRow();
    const cells = [turn.turn, turn.conversation, turn.outcome, turn.ttft_s, turn.duration_s, turn.context_tokens];
    cells.forEach((value, n) => {
      const cell = made.insertCell();
      cell.textContent = value === null ? "-" : n === 3 || n === 4 ? value.toFixed(2) : value.toLocaleString("en");
      cell.className = n === 2 ? (turn.outcome === "ok" ? "ok" : "bad") : "number";
    });
  }

  function show(now) {
    put("turns", now.planned ? `${now.turns} of ${now.planned}` : String(now.turns));
    put("outcomes", Object.entries(now.outcomes).map(([name, count]) => `${name} ${count}`).join(", ") || "none yet");
    put("faults", now.faults.join("; ") || "none so far");
    put("bound", now.upper_95 === null ? "-" : `at most ${(100 * now.upper_95).toPrecision(3)} % a turn at 95 %`);
    put("tokens", `${now.prompt_tokens.toLocaleString("en")}, ${now.output_tokens.toLocaleString("en")}`);
    const table = document.getElementById("live-body");
    table.replaceChildren();
    for (const turn of now.newest) row(table, turn);
  }

  async function poll() {
    try {
      const answer = await fetch(box.dataset.live, {cache: "no-store"});
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const now = await answer.json();
      failed = 0;
      if (!now.running) { location.reload(); return; }
      show(now);
      put("said", "Followed as it goes; what follows below is as of when this page was drawn.");
    } catch (error) {
      failed += 1;
      put("said", `Not followed any more since ${failed} tries: ${error.message}`);
      if (failed >= PATIENCE) return;
    }
    setTimeout(poll, POLL_MS);
  }
  poll();
})();
