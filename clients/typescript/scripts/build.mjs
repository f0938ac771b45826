// Makes dist: the same modules for `import` and for `require`, each with its types.

import { execFileSync } from 'node:child_process';
import { rmSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

const root = path.resolve(path.dirname(fileURLToPath(import.meta.url)), '..');
const compiler = path.join(root, 'node_modules', 'typescript', 'bin', 'tsc');
rmSync(path.join(root, 'dist'), { recursive: true, force: true });
for (const kind of ['esm', 'cjs']) {
  execFileSync(process.execPath, [compiler, '-p', `tsconfig.${kind}.json`], { cwd: root, stdio: 'inherit' });
}
writeFileSync(path.join(root, 'dist', 'cjs', 'package.json'), '{ "type": "commonjs" }\n');
