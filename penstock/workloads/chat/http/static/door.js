// Signing in, where the server requires it: by an account, an invitation, or a token of the project.

import { Refused, isSignedIn, send, signIn, signOut, signUp, takeToken } from "./api.js";
import { button, element, field, form } from "./elements.js";

const place = document.getElementById("door");
const who = document.getElementById("who");

// Calls `act`; if the server requires a sign-in, shows the form for it and calls `again` afterwards.
export async function opened(act, again = act) {
  try {
    await act();
  } catch (error) {
    if (!(error instanceof Refused) || error.status !== 401) throw error;
    ask(again);
  }
}

function ask(again) {
  const entered = (enter) => async (values) => {
    await enter(values);
    place.hidden = true;
    place.replaceChildren();
    await tell();
    await opened(again);
  };
  // A link that the owner of the project has sent: …/chat#invitation=CODE
  const invited = new URLSearchParams(location.hash.slice(1)).get("invitation") ?? "";
  const name = () => field("Name", "name", { autocomplete: "username", required: true });
  place.replaceChildren(
    element("h2", {}, "Sign in"),
    form("Sign in", entered(({ name: called, password }) => signIn(called, password)), name(),
      field("Password", "password", { type: "password", autocomplete: "current-password", required: true })),
    element("details", { open: invited !== "" }, element("summary", {}, "I was invited"),
      form("Sign up", entered(({ name: called, password, invitation }) => signUp(called, password, invitation)),
        field("Invitation", "invitation", { autocomplete: "off", required: true, value: invited }), name(),
        field("New password", "password", { type: "password", autocomplete: "new-password", required: true }))),
    element("details", {}, element("summary", {}, "I have a token"),
      form("Go on", entered(({ token }) => takeToken(token)),
        field("Token of the project", "token", { type: "password", required: true, autocomplete: "off" }))));
  place.hidden = false;
}

// Shows who has signed in, and a button to sign out.
export async function tell() {
  who.hidden = !isSignedIn();
  if (who.hidden) return;
  const found = await (await send("GET", "/api/me")).json();
  who.replaceChildren(`${found.name}, ${found.role} of ${found.project} `, button("Sign out", async () => {
    await signOut();
    location.reload();
  }));
}
