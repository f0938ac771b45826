// Makes src/generated from openapi/*.json: types of each document, and a table of its routes.
//
//   node scripts/generate.mjs [FOLDER]     into FOLDER in place of src/generated

import { mkdir, readFile, rm, writeFile } from 'node:fs/promises';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

import { createClient } from '@hey-api/openapi-ts';

const root = path.resolve(path.dirname(fileURLToPath(import.meta.url)), '..');
const out = path.resolve(process.argv[2] ?? path.join(root, 'src', 'generated'));
const NAMES = ['gateway', 'prompts'];
const NOTE = '// Made by scripts/generate.mjs from openapi/; do not edit.\n';

/** A table of the routes of a document: for each what it takes and what it answers. */
function routesOf(document, types) {
  const operations = [];
  for (const [, name, body] of types.matchAll(/export type (\w+)Data = \{([\s\S]*?)\n\};/g)) {
    const url = /url: '([^']+)'/.exec(body)[1];
    operations.push({ name, url });
  }
  const lines = [];
  const used = new Set();
  for (const [url, methods] of Object.entries(document.paths)) {
    for (const method of Object.keys(methods)) {
      const verb = method[0].toUpperCase() + method.slice(1);
      const found = operations.find((one) => one.url === url && one.name.endsWith(verb));
      if (found === undefined) throw new Error(`${method} ${url}: no type of that name was made`);
      used.add(`${found.name}Data`);
      const answers = `${found.name}Responses`;
      const known = types.includes(`export type ${answers} `);
      if (known) used.add(answers);
      const answer = known ? `${answers}[keyof ${answers}]` : 'unknown';
      lines.push(`  '${method.toUpperCase()} ${url}': { takes: ${found.name}Data; answers: ${answer} };`);
    }
  }
  return { lines: lines.sort(), used: [...used].sort() };
}

/** A document without the lengths of arrays: an array of 1,536 numbers is no tuple of as many. */
function withoutLengths(document) {
  return JSON.parse(JSON.stringify(document, (key, value) => (/^(min|max)Items$/.test(key) ? undefined : value)));
}

await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });
for (const name of NAMES) {
  const document = JSON.parse(await readFile(path.join(root, 'openapi', `${name}.json`), 'utf8'));
  await createClient({
    input: withoutLengths(document),
    output: { path: path.join(out, name), entryFile: false },
    plugins: [{ name: '@hey-api/typescript', comments: true }],
    logs: { level: 'silent', file: false },
  });
  const types = await readFile(path.join(out, name, 'types.gen.ts'), 'utf8');
  const { lines, used } = routesOf(document, types);
  const title = name[0].toUpperCase() + name.slice(1);
  const imported = used.map((one) => `  ${one},`).join('\n');
  await writeFile(
    path.join(out, `${name}-routes.gen.ts`),
    `${NOTE}import type {\n${imported}\n} from './${name}/types.gen.js';\n\n` +
      `/** The routes of ${name}: what each takes, and what it answers. */\n` +
      `export interface ${title}Routes {\n${lines.join('\n')}\n}\n`,
  );
}
