// The differences of two texts, by words.

const WORDS = /\s+|[^\s]+/g;
const MOST = 4_000_000;

// Returns parts { kind: "same" | "new" | "gone", text } that make up both texts.
export function differences(before, after) {
  const [a, b] = [before.match(WORDS) ?? [], after.match(WORDS) ?? []];
  let first = 0;
  while (first < a.length && first < b.length && a[first] === b[first]) first += 1;
  let last = 0;
  while (last < a.length - first && last < b.length - first && a.at(-1 - last) === b.at(-1 - last)) last += 1;
  const middle = between(a.slice(first, a.length - last), b.slice(first, b.length - last));
  return joined([
    ...a.slice(0, first).map((text) => ({ kind: "same", text })),
    ...middle,
    ...a.slice(a.length - last).map((text) => ({ kind: "same", text })),
  ]);
}

// The longest common subsequence; for very long texts, everything counts as new.
function between(a, b) {
  if (a.length * b.length > MOST) return all(a, b);
  const width = b.length + 1;
  const lengths = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      lengths[i * width + j] = a[i] === b[j]
        ? lengths[(i + 1) * width + j + 1] + 1
        : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  const parts = [];
  let [i, j] = [0, 0];
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) {
      parts.push({ kind: "same", text: a[i] });
      i += 1;
      j += 1;
    } else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) {
      parts.push({ kind: "gone", text: a[i] });
      i += 1;
    } else {
      parts.push({ kind: "new", text: b[j] });
      j += 1;
    }
  }
  return [...parts, ...all(a.slice(i), b.slice(j))];
}

function all(gone, fresh) {
  return [...gone.map((text) => ({ kind: "gone", text })), ...fresh.map((text) => ({ kind: "new", text }))];
}

function joined(parts) {
  const made = [];
  for (const part of parts) {
    if (made.at(-1)?.kind === part.kind) made.at(-1).text += part.text;
    else made.push({ ...part });
  }
  return made;
}
