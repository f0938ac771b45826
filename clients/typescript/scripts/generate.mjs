// Makes src/generated from the OpenAPI documents of the gateway and of prompts: types of each, and a table of its routes.
//
// The documents come from the repository by a Python that has Penstock installed: that of an active environment, of
// the repository's .venv, else `python3`.

import { execFileSync } from 'node:child_process';
import { existsSync } from 'node:fs';
import { mkdir, mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

import { createClient } from '@hey-api/openapi-ts';

const root = path.resolve(path.dirname(fileURLToPath(import.meta.url)), '..');
const repository = path.resolve(root, '..', '..');
const out = path.join(root, 'src', 'generated');
const NAMES = ['gateway', 'prompts'];
const NOTE = '// Made by scripts/generate.mjs; do not edit.\n';

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

/** Write the documents into a folder. */
function describe(folder) {
  const environments = [process.env.VIRTUAL_ENV, path.join(repository, '.venv')].filter(Boolean);
  const python = environments.map((one) => path.join(one, 'bin', 'python')).find(existsSync) ?? 'python3';
  execFileSync(python, [path.join('clients', 'describe.py'), folder], {
    cwd: repository,
    env: { ...process.env, PYTHONPATH: repository },
    stdio: ['ignore', 'inherit', 'inherit'],
  });
}

const documents = await mkdtemp(path.join(tmpdir(), 'penstock-openapi-'));
describe(documents);
await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });
for (const name of NAMES) {
  const document = JSON.parse(await readFile(path.join(documents, `${name}.json`), 'utf8'));
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
await rm(documents, { recursive: true });
