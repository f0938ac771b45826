/**
 * Trains a policy of prompts from this program alone.
 *
 *     npx tsx demo.ts                      a stand-in for the server, without Python
 *     npx tsx demo.ts --full               a server is started, and a network trained
 *       [--episodes 3000] [--length 5] [--update 100] [--parallel 8] [--port 8765] [--state DIR] [--json FILE]
 *       [--prompts FILE]                   a list of prompts as JSON, in place of its own
 */

import { readFileSync, writeFileSync } from 'node:fs';
import { parseArgs } from 'node:util';

import { RLTrainer } from './src/index.js';

const { values } = parseArgs({
  options: {
    full: { type: 'boolean', default: false },
    episodes: { type: 'string' },
    length: { type: 'string', default: '5' },
    update: { type: 'string' },
    parallel: { type: 'string' },
    port: { type: 'string', default: '8765' },
    state: { type: 'string', default: 'prompts-state' },
    json: { type: 'string' },
    prompts: { type: 'string' },
    train: { type: 'string', multiple: true, default: [] },
  },
});

const TASKS = [
  'Write a function that {}',
  'Review this code, which {}',
  'Write an article about how a team {}',
  'Write a slogan for a product that {}',
  'Analyse the data of a shop that {}',
  'What happens when somebody {}',
  'Write a poem about a machine that {}',
];
const SUBJECTS = [
  'sorts a list of names',
  'counts the birds in a garden',
  'sends letters to its friends',
  'measures the rain of a year',
  'finds the shortest way home',
  'keeps a diary of its dreams',
  'bakes bread for a village',
  'draws maps of the coast',
];
const own = TASKS.flatMap((task) => SUBJECTS.map((subject) => task.replace('{}', subject)));
const prompts = values.prompts === undefined ? own : (JSON.parse(readFileSync(values.prompts, 'utf8')) as string[]);

const numEpisodes = Number(values.episodes ?? (values.full ? 3000 : 300));
const trainer = new RLTrainer({
  simulated: !values.full,
  serverPort: Number(values.port),
  stateDir: values.state,
  serverArgs: values.train.map((one) => `--train=${one}`),
  onServerLog: (line) => process.stderr.write(`server: ${line}\n`),
});

const began = performance.now();
await trainer.start();
const ready = performance.now();
try {
  const stats = await trainer.train({
    prompts,
    numEpisodes,
    episodeLength: Number(values.length),
    updateInterval: Number(values.update ?? (values.full ? 100 : 30)),
    parallel: Number(values.parallel ?? (values.full ? 8 : 1)),
    onProgress: ({ episode, avgReward, update }) => {
      if (update !== null) process.stdout.write(`episode ${episode}: mean reward ${avgReward.toFixed(3)}\n`);
    },
  });
  const third = Math.max(1, Math.floor(numEpisodes / 10));
  const [first, last] = [stats.rewards.slice(0, third), stats.rewards.slice(-third)];
  const result = {
    episodes: stats.episodes,
    updates: stats.updates,
    seconds_to_start: (ready - began) / 1000,
    seconds: (performance.now() - ready) / 1000,
    first: mean(first),
    last: mean(last),
    standard_error: Math.hypot(standardError(first), standardError(last)),
  };
  process.stdout.write(`${JSON.stringify(result)}\n`);
  if (values.json !== undefined) writeFileSync(values.json, JSON.stringify({ ...result, rewards: stats.rewards }));
} finally {
  await trainer.stop();
}

function mean(numbers: number[]): number {
  return numbers.reduce((total, one) => total + one, 0) / numbers.length;
}

function standardError(numbers: number[]): number {
  const middle = mean(numbers);
  const variance = numbers.reduce((total, one) => total + (one - middle) ** 2, 0) / Math.max(1, numbers.length - 1);
  return Math.sqrt(variance / numbers.length);
}
