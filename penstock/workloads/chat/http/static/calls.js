// Calls of the chat. Who has no account is known by the name that this browser has made for itself: by it, and by
// nothing else, they find again what they have said.

import { events, send } from "./api.js";

const ME = "penstock-chat-me";
let agent = "";

// Whom calls are about from now on; "": the first.
export const talkTo = (name) => {
  agent = name;
};

export const fresh = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (one) => one.toString(16).padStart(2, "0")).join("");

export function me() {
  let name = localStorage.getItem(ME);
  if (name === null) {
    name = fresh();
    localStorage.setItem(ME, name);
  }
  return name;
}

export const forgetMe = () => localStorage.removeItem(ME);

const about = (path) => (agent === "" ? path : `${path}?agent=${encodeURIComponent(agent)}`);

export async function call(method, path, body) {
  return (await send(method, about(path), body)).json();
}

// Yields the server-sent events of a call.
export const follow = (path, body, signal) => events(about(path), signal, body);
