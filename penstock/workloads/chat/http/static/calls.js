// Calls of the chat. A person without an account is identified by a random name that this browser keeps: only by it
// can they find their ratings again.

import { events, send } from "./api.js";

const ME = "penstock-chat-me";
let agent = "";

// Selects the agent of further calls; "": the first.
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
