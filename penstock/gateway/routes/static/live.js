// What a project does, as the gateway sends it; a stream that breaks off is asked for again.

import { Refused, events } from "./api.js";

const AGAIN_MS = 2000;
const PASSING = new Set([429, 502, 503, 504]);

// job: the one that is looked at, "" for none. shown: a function for each kind of event that is looked at. Returns when `signal` says so; throws what is refused.
export async function live(base, job, signal, shown) {
  const path = `${base}/events?job=${encodeURIComponent(job)}`;
  while (!signal.aborted) {
    try {
      for await (const { event, data } of events(path, signal)) {
        if (event === "refused") throw new Refused(401, { detail: data });
        shown[event]?.(data);
      }
    } catch (error) {
      if (signal.aborted || (error instanceof Refused && !PASSING.has(error.status))) throw error;
    }
    await new Promise((wake) => { setTimeout(wake, AGAIN_MS); });
  }
}

// Puts new content into a place; who works by the keyboard stays where they were.
export function refill(place, ...children) {
  const had = place.contains(document.activeElement) ? document.activeElement : null;
  place.replaceChildren(...children);
  if (had === null || had === place) return;
  [...place.querySelectorAll(had.tagName)].find((one) => one.textContent === had.textContent
    && one.getAttribute("href") === had.getAttribute("href"))?.focus();
}
