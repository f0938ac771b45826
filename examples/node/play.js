// node play.js ADDRESS --episodes N [--learn] [--seed S]: plays CartPole and prints one line of JSON.

import { parseArgs } from 'node:util';

import { CartPole, seeded } from './cartpole.js';
import { PolicyClient, Refused } from './policy.js';

const LOST = new Set(['REASON_EPISODE_UNKNOWN', 'REASON_EPISODE_ELSEWHERE']);
const MOST_LOST = 3; // in a row

// One episode; its return as the server added it up.
async function play(client, environment, learned) {
  const { episode_id } = await client.startEpisode(learned);
  let last = { observation: environment.reset() };
  for (let step = 0; !last.terminated && !last.truncated; step += 1) {
    const action = await client.act(episode_id, step, last.observation, last.reward);
    last = environment.step(action);
  }
  return (await client.endEpisode(episode_id, last)).total_return;
}

// The returns of so many episodes; one that the server lost (it was restarted) is played anew.
async function playAll(client, environment, episodes, learned) {
  const returns = [];
  for (let lost = 0; returns.length < episodes; ) {
    try {
      returns.push(await play(client, environment, learned));
      lost = 0;
    } catch (error) {
      lost += 1;
      if (!(error instanceof Refused && LOST.has(error.reason)) || lost >= MOST_LOST) throw error;
    }
  }
  return returns;
}

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    episodes: { type: 'string', default: '10' },
    learn: { type: 'boolean', default: false },
    seed: { type: 'string' },
  },
});
const episodes = Number(values.episodes);
if (positionals.length !== 1 || !Number.isInteger(episodes) || episodes < 1) {
  console.error('usage: node play.js ADDRESS [--episodes N] [--learn] [--seed S]');
  process.exit(2);
}

const client = new PolicyClient(positionals[0]);
try {
  await client.describe();
  const environment = new CartPole(values.seed === undefined ? Math.random : seeded(Number(values.seed)));
  const returns = await playAll(client, environment, episodes, values.learn);
  const mean = returns.reduce((sum, value) => sum + value, 0) / returns.length;
  console.log(JSON.stringify({ episodes: returns.length, mean_return: mean }));
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
} finally {
  client.close();
}
