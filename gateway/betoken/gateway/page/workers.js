// Polls the state of the workers.

import { info } from "./api.js";
import { make, table } from "./dom.js";

const PERIOD_MS = 2000;

function state(worker) {
  const is_ready = worker.state === "ready";
  const text = is_ready ? "● ready" : `○ ${worker.state === "connecting" ? "away" : worker.state}`;
  return make("span", text, { class: is_ready ? "state-ready" : "state-away", title: worker.detail });
}

function show(place, model) {
  const rows = model.workers.map((worker) => [
    make("span", worker.role, { title: [worker.worker_id, worker.address, worker.drafters.join(", ") || worker.dtype].filter(Boolean).join(", ") }),
    state(worker),
    worker.running,
    `${worker.free_pages} of ${worker.total_pages}`,
  ]);
  const focused = document.activeElement === place;
  place.replaceChildren(table([["role", "state", "running", "free pages"], ...rows], "Workers"));
  if (focused) place.focus();
}

/** Keep `place` up to date; `onModel(model, fault)` receives each description, or null and the reason. */
export async function follow(place, keyOf, onModel) {
  for (;;) {
    if (!document.hidden) {
      try {
        const model = await info(keyOf());
        show(place, model);
        onModel(model, "");
      } catch (fault) {
        const text = fault.code === "loading" ? fault.message : `the router does not answer: ${fault.message}`;
        place.replaceChildren(make("p", text, { class: "state-away" }));
        onModel(null, fault.message);
      }
    }
    await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
  }
}
