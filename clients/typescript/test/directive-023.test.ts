import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createServer as createHttpServer, type IncomingMessage } from 'node:http';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';

import { PenstockClient, PenstockError, PenstockUnreachable, RLInterface, RLTrainer } from '../src/index.js';
import type { RLConfig } from '../src/index.js';

const ROOT = resolve(fileURLToPath(import.meta.url), '..', '..');
const PROMPTS = ['Write a function that sorts a list', 'Write a poem about rain', 'What is a neap tide?'];
/** A network whose updates take little time. */
const SMALL = ['--train=policy.hidden_sizes=[16]', '--train=policy.dropout=0.0'];
const PATIENCE_MS = 240_000;
const LEAST_STEPS = 128;

async function freePort(): Promise<number> {
  const server = createServer();
  await new Promise<void>((done) => server.listen(0, '127.0.0.1', done));
  const address = server.address();
  assert.ok(address !== null && typeof address === 'object');
  await new Promise((done) => server.close(done));
  return address.port;
}

describe('DIRECTIVE-023: a policy of prompts for TypeScript', function () {
  this.timeout(2 * PATIENCE_MS);

  describe('with a server of real processes', () => {
    const lines: string[] = [];
    let folder: string;
    let config: Partial<RLConfig>;
    let rl: RLInterface;

    before(async () => {
      folder = mkdtempSync(join(tmpdir(), 'penstock-'));
      config = {
        serverPort: await freePort(),
        stateDir: join(folder, 'state'),
        serverArgs: SMALL,
        startTimeoutMs: PATIENCE_MS,
        onServerLog: (line) => lines.push(line),
      };
      rl = new RLInterface(config);
      assert.equal(await rl.checkHealth(), false);
      await rl.startServer();
    });

    after(async () => {
      await rl.stopServer();
      assert.equal(await rl.checkHealth(), false);
      const summary = JSON.parse(readFileSync(join(folder, 'state', 'run', 'summary.json'), 'utf8'));
      assert.equal(summary.ledger.balanced, true);
      rmSync(folder, { recursive: true });
    });

    it('starts it, is told what it writes, and finds it healthy', async () => {
      assert.equal(await rl.checkHealth(), true);
      assert.ok(lines.some((line) => line.includes('serving')));
    });

    it('chooses mutations for embeddings and for prompts', async () => {
      const embedding = await rl.embed('Write a haiku');
      const action = await rl.selectAction(embedding);
      assert.ok(action.actionIndex >= 0 && action.actionIndex < 5);
      assert.ok(Math.abs(Math.log(action.probability) - action.logProb) < 1e-6);
      const { probabilities, mutationTypes } = await rl.getActionDistribution(embedding);
      assert.equal(mutationTypes[action.actionIndex], action.mutationType);
      assert.ok(Math.abs(probabilities.reduce((sum, one) => sum + one, 0) - 1) < 1e-4);
      const likeliest = await rl.selectMutation('Write a haiku', true);
      assert.equal(likeliest.actionIndex, probabilities.indexOf(Math.max(...probabilities)));
    });

    it('learns from transitions, and from none too few', async () => {
      assert.equal(await rl.update(), null);
      for (let steps = 0; steps < LEAST_STEPS; steps += 5) await rl.trainEpisode(PROMPTS, 5);
      const made = await rl.update();
      assert.ok(made !== null);
      assert.equal(made.updateCount, 1);
      assert.equal(made.bufferSize, 0);
      assert.ok(Number.isFinite(made.policyLoss) && Number.isFinite(made.learningRate));
      const stats = await rl.getStats();
      assert.equal(stats?.totalUpdates, 1);
    });

    it('stores a transition between two prompts, rewarded by a function', async () => {
      const action = await rl.selectMutation(PROMPTS[0]!);
      const made = await rl.mutate(PROMPTS[0]!, action.actionIndex);
      assert.equal(await rl.collectExperience(PROMPTS[0]!, action, made.prompt, 0.5, true), 1);
      rl.setRewardModel((before, after) => (before === after ? 0 : 2));
      const played = await rl.trainEpisode(PROMPTS, 2);
      rl.setRewardModel(null);
      assert.equal(played.totalReward % 2, 0);
    });

    it('keeps checkpoints under names and goes back to them', async () => {
      const name = await rl.saveCheckpoint('first');
      assert.equal(name, 'first');
      assert.equal(await rl.loadCheckpoint(name), true);
      assert.equal(await rl.loadCheckpoint('absent'), false);
      await assert.rejects(rl.loadCheckpoint('../../etc/passwd'), (error: PenstockError) => error.field === 'path');
    });

    it('says what is wrong by field', async () => {
      await assert.rejects(rl.selectAction([1, 2, 3]), /embedding: has 3 numbers/);
      const client = new PenstockClient({ baseUrl: `http://127.0.0.1:${config.serverPort}` });
      await assert.rejects(client.call('POST /select_action', { body: { embedding: [1] } }), (error: unknown) => {
        assert.ok(error instanceof PenstockError);
        assert.deepEqual([error.status, error.field], [422, 'embedding']);
        return true;
      });
    });

    it('outlives a server that is killed in the middle of trainEpisode', async () => {
      const pid = rl.serverPid;
      assert.ok(pid !== undefined);
      rl.setRewardModel((_before, _after, action) => {
        process.kill(pid, 'SIGKILL');
        return action.value;
      });
      await assert.rejects(rl.trainEpisode(PROMPTS, 5), PenstockUnreachable);
      rl.setRewardModel(null);
      const played = await rl.trainEpisode(PROMPTS, 5); // starts the server again
      assert.equal(played.steps, 5);
      assert.notEqual(rl.serverPid, pid);
      assert.equal((await rl.getStats())?.totalUpdates, 1);
    });

    it('trains', async () => {
      const told: number[] = [];
      const trainer = new RLTrainer(rl);
      await trainer.start();
      const stats = await trainer.train(PROMPTS, 30, 5, 30, ({ episode }) => told.push(episode));
      assert.deepEqual([stats.episodes, stats.updates, told.at(-1)], [30, 1, 30]);
      assert.equal(stats.avgReward, stats.rewards.reduce((sum, one) => sum + one, 0) / 30);
      const few = await trainer.train({ prompts: PROMPTS, numEpisodes: 4, episodeLength: 1, parallel: 2 });
      assert.equal(few.updates, 0);
    });
  });

  it('waits where too many steps wait for an update, and shows its token', async () => {
    const asked: { after: number; token: string | undefined }[] = [];
    const began = Date.now();
    const statuses = [429, 429, 200];
    const server = createHttpServer((request: IncomingMessage, answer) => {
      asked.push({ after: Date.now() - began, token: request.headers.authorization });
      request.resume().on('end', () => {
        const status = statuses[asked.length - 1] ?? 500;
        const body = status === 200 ? { stored: true, buffer_size: 7, verified: true, duplicate: false } : { error: 'too_many', detail: 'POST /update', field: null };
        answer.writeHead(status, { 'content-type': 'application/json', 'retry-after': '1' }).end(JSON.stringify(body));
      });
    });
    const serverPort = await freePort();
    await new Promise<void>((done) => server.listen(serverPort, '127.0.0.1', done));
    try {
      const rl = new RLInterface({ serverPort, autoStartServer: false, token: 'pst_abc' });
      const state = new Array<number>(1536).fill(0);
      const stored = await rl.storeExperience({
        state, action: 1, reward: 0.5, nextState: state, done: true, logProb: -1, value: 0,
      });
      assert.equal(stored, 7);
      assert.deepEqual(asked.map((one) => one.token), ['Bearer pst_abc', 'Bearer pst_abc', 'Bearer pst_abc']);
      const gaps = asked.slice(1).map((one, at) => one.after - asked[at]!.after);
      assert.ok(gaps.every((gap) => gap >= 990), `it came again after ${gaps.join(', ')} ms`);
    } finally {
      await new Promise((done) => server.close(done));
    }
  });

  it('tells why a server could not be started', async () => {
    const rl = new RLInterface({ pythonPath: '/absent/python', serverPort: await freePort() });
    await assert.rejects(rl.startServer(), /set pythonPath/);
  });

  it('works without Python, simulated', async () => {
    const stats = await new RLTrainer({ simulated: true }).train({ prompts: PROMPTS, numEpisodes: 60, updateInterval: 30 });
    assert.deepEqual([stats.episodes, stats.updates], [60, 2]);
  });

  it('is packed, installed into an empty project and used there, by import and by require', () => {
    const folder = mkdtempSync(join(tmpdir(), 'penstock-packed-'));
    const npm = (...words: string[]): string =>
      execFileSync('npm', words, { cwd: folder, encoding: 'utf8', env: { ...process.env, npm_config_offline: 'true' } });
    try {
      execFileSync(process.execPath, [join(ROOT, 'scripts', 'build.mjs')], { cwd: ROOT });
      const [packed] = JSON.parse(npm('pack', ROOT, '--json', '--ignore-scripts')) as { filename: string }[];
      assert.ok(packed !== undefined);
      writeFileSync(join(folder, 'package.json'), '{ "private": true }');
      npm('install', '--no-audit', '--no-fund', `./${packed.filename}`);
      const use = 'new RLTrainer({ simulated: true }).train(["a"], 2).then((s) => console.log(s.episodes));';
      writeFileSync(join(folder, 'a.mjs'), `import { RLTrainer } from 'penstock-client';\n${use}`);
      writeFileSync(join(folder, 'b.cjs'), `const { RLTrainer } = require('penstock-client');\n${use}`);
      for (const file of ['a.mjs', 'b.cjs']) {
        assert.equal(execFileSync(process.execPath, [file], { cwd: folder, encoding: 'utf8' }).trim(), '2');
      }
    } finally {
      rmSync(folder, { recursive: true });
    }
  });
});
