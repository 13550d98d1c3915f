// Shows how far a verification is. Without this script the page reloads itself.
"use strict";
const box = document.getElementById("running"), bar = document.getElementById("bar"), count = document.getElementById("count");
async function look() {
  try {
    const state = await (await fetch("/verification/state")).json();
    bar.max = state.total || 1;
    bar.value = state.done;
    count.textContent = `${state.done.toLocaleString("en")} of ${state.total.toLocaleString("en")} leaves`;
    if (!state.running) { location.reload(); return; }
  } catch (error) { /* the service is busy or gone: ask again later */ }
  setTimeout(look, 400);
}
if (!box.hidden) { setTimeout(look, 200); }
