// What each criterion counts in the reward of the loop, how well the newest reward model knows it, and a form to change it.

import { element, field, table } from "./elements.js";

const two = (number) => (number === null ? "–" : number.toFixed(2));

// One line for each criterion. one: the loop, as the overview has it.
export function criteria(one) {
  const known = Object.fromEntries((one.judge?.heads ?? []).map((head) => [head.head, head]));
  if (one.judge) {
    known.preferred = { weight: one.judge.pairsWeight, ratings: one.judge.pairs, auc: one.judge.pairAccuracy, squaredError: null, calibrationError: null };
  }
  const names = [...new Set([...Object.keys(one.weights), ...Object.keys(known)])];
  return [
    table("What counts in the reward, and how well the newest reward model knows it",
      ["criterion", "counts next", "counted", "ratings held out", "told apart", "squared error", "calibration error"],
      names.map((name) => {
        const head = known[name];
        const measured = head ? [head.weight, head.ratings, two(head.auc), two(head.squaredError), two(head.calibrationError)] : ["–", "–", "–", "–", "–"];
        return [name, one.weights[name], ...measured];
      })),
    element("p", { class: "who" }, one.judge === null ? "No reward model has been trained yet."
      : `Measured in round ${one.judge.round}, on ratings that the model had not learned from; what calibrates it is fitted to the same. Told apart: how often the better rated of two `
        + "answers gets the higher number, 0.5 by chance. Calibration error: how far what is expected lies from what was said, 0 to 1."),
  ];
}

// Fields for the weights, and what of them was changed; `changed` is null where a field does not fit.
export function weighing(weights) {
  const fields = Object.entries(weights).map(([name, weight]) =>
    field(`${name} counts`, name, { type: "number", min: "0", step: "any", required: true, value: weight, autocomplete: "off" }));
  const inputs = fields.map((one) => one.querySelector("input"));
  const changed = () => {
    if (!inputs.every((one) => one.reportValidity())) return null;
    return Object.fromEntries(inputs.filter((one) => one.valueAsNumber !== weights[one.name]).map((one) => [one.name, one.valueAsNumber]));
  };
  return { fields: element("fieldset", { class: "weights" }, element("legend", {}, "What counts from the next round on"), fields), changed };
}
