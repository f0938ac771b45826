// Satisfaction over time and over people: by day, how many are more or less content than all, and who has rated.

import { element, table } from "./elements.js";

export const share = (number) => (number === null ? "–" : `${(100 * number).toFixed(0)} %`);

export const satisfied = (one, least) => (one.satisfaction === null
  ? `cannot tell below ${least} conversations`
  : `${share(one.satisfaction)} (${share(one.low)} to ${share(one.high)})`);

const counted = (one, least) => [one.conversations, one.rated, one.thumbsUp, satisfied(one, least)];

function people({ people: all, leastConversations: least }) {
  const rated = `${all.everRated} of ${all.talked} people have ever given a thumb.`;
  const side = (one) => `${share(one.share)} (${share(one.low)} to ${share(one.high)})`;
  const spread = all.below.share === null
    ? ` Below ${least} people one cannot tell how satisfaction is spread over them.`
    : ` Of all conversations ${share(all.satisfaction)} are liked; of the people ${side(all.below)} like fewer of theirs, and `
      + `${side(all.above)} more.`;
  return element("p", { id: "people" }, rated, spread);
}

export function spread(found) {
  const least = found.leastConversations;
  const columns = ["conversations", "rated", "thumbs up", "satisfaction"];
  return [
    table("Satisfaction by day (UTC)", ["day", ...columns], found.days.map((one) => [one.day, ...counted(one, least)])),
    people(found),
    table(`Satisfaction by person: of those who have rated, the ${found.mostRaters} who talked most`, ["person", ...columns], found.raters.map((one) => [one.rater, ...counted(one, least)])),
  ];
}
