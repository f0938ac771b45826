/** A policy of prompts: chooses mutations, and learns from what came of them. */

import { type Backend, HttpBackend } from './backend.js';
import { PenstockClient } from './penstock-client.js';
import { findPython, GatewayProcess } from './gateway-process.js';
import type {
  ActionDistribution,
  Embedding,
  EpisodeResult,
  MutatedPrompt,
  RewardModel,
  RLAction,
  RLConfig,
  RLExperience,
  RLStats,
  UpdateResult,
} from './rl-types.js';
import { SimulatedBackend } from './simulated.js';

const DEFAULTS: Omit<RLConfig, 'pythonPath'> = {
  serverHost: 'localhost',
  serverPort: 8765,
  embeddingDim: 1536,
  autoStartServer: true,
  token: '',
  stateDir: 'prompts-state',
  serverArgs: [],
  startTimeoutMs: 120_000,
  onServerLog: () => undefined,
  simulated: false,
};

/**
 * An interface to one server.
 *
 *     const rl = new RLInterface();
 *     await rl.startServer();
 *     const action = await rl.selectMutation('Write a function that sorts a list');
 *     …
 *     await rl.stopServer();
 */
export class RLInterface {
  readonly config: RLConfig;
  private readonly backend: Backend;
  private gateway: GatewayProcess | undefined;
  private starting: Promise<void> | undefined;
  private rewardModel: RewardModel | undefined;
  /** Whether a server has answered that, as far as is known, has not ended since. */
  private answered = false;

  constructor(config: Partial<RLConfig> = {}) {
    this.config = { ...DEFAULTS, ...config, pythonPath: config.pythonPath ?? findPython() };
    // "localhost" may lead to ::1 first, where the server does not listen.
    const host = this.config.serverHost === 'localhost' ? '127.0.0.1' : this.config.serverHost;
    const baseUrl = `http://${host}:${this.config.serverPort}`;
    const token = this.config.token;
    const onUnreachable = (): void => {
      this.answered = false;
    };
    this.backend = this.config.simulated
      ? new SimulatedBackend(1, this.config.embeddingDim)
      : new HttpBackend(new PenstockClient({ baseUrl, onUnreachable, ...(token === '' ? {} : { token }) }));
  }

  /** Starts the server, unless one answers, and resolves once it is healthy. */
  async startServer(): Promise<void> {
    this.starting ??= this.start().finally(() => (this.starting = undefined));
    await this.starting;
  }

  /** Ends the server that was started here, once it has drained; what was learned stays in its folder. */
  async stopServer(): Promise<void> {
    const gateway = this.gateway;
    this.gateway = undefined;
    this.answered = false;
    await gateway?.stop();
  }

  /** Process of the server that was started here; undefined where none was. */
  get serverPid(): number | undefined {
    return this.gateway?.isRunning === true ? this.gateway.pid : undefined;
  }

  /** Whether actions are given. */
  async checkHealth(): Promise<boolean> {
    return this.backend.isHealthy();
  }

  /** Chooses a mutation for an embedding. deterministic: the likeliest, which is not learned from. */
  async selectAction(embedding: Embedding, deterministic = false): Promise<RLAction> {
    await this.ready();
    this.checkLength('embedding', embedding);
    const chosen = await this.backend.select(embedding, deterministic);
    return {
      actionIndex: chosen.action,
      mutationType: chosen.mutation_type,
      probability: Math.exp(chosen.log_prob),
      logProb: chosen.log_prob,
      value: chosen.value,
      version: chosen.version,
      ticket: chosen.ticket,
    };
  }

  /** Chooses a mutation for a prompt. */
  async selectMutation(prompt: string, deterministic = false): Promise<RLAction> {
    return this.selectAction(await this.embed(prompt), deterministic);
  }

  /** Returns how likely each mutation is. */
  async getActionDistribution(embedding: Embedding): Promise<ActionDistribution> {
    await this.ready();
    this.checkLength('embedding', embedding);
    return this.backend.distribution(embedding);
  }

  /** Returns a prompt as numbers. */
  async embed(prompt: string): Promise<Embedding> {
    await this.ready();
    return this.backend.embed(prompt);
  }

  /** Returns what a mutation makes of a prompt. start: the prompt before all mutations. */
  async mutate(prompt: string, action: number, start = prompt): Promise<MutatedPrompt> {
    await this.ready();
    return this.backend.mutate(prompt, action, start, true);
  }

  /** Stores a transition, to be learned from; returns how many wait for an update. */
  async storeExperience(experience: RLExperience): Promise<number> {
    await this.ready();
    this.checkLength('state', experience.state);
    this.checkLength('nextState', experience.nextState);
    return this.backend.store(experience);
  }

  /** Stores a transition between two prompts; returns how many wait for an update. */
  async collectExperience(
    before: string,
    action: RLAction,
    after: string,
    reward: number,
    done = false,
  ): Promise<number> {
    return this.storeExperience({
      state: await this.embed(before),
      action: action.actionIndex,
      reward,
      nextState: await this.embed(after),
      done,
      logProb: action.logProb,
      value: action.value,
      ticket: action.ticket,
    });
  }

  /** Has what is stored learned from; null where it is too little. */
  async update(): Promise<UpdateResult | null> {
    await this.ready();
    return this.backend.update();
  }

  /** Rewards steps of `trainEpisode` by a function in place of the server's own reward; null: the server's. */
  setRewardModel(model: RewardModel | null): void {
    this.rewardModel = model ?? undefined;
  }

  /** Plays one episode from a prompt that is drawn, and stores its steps. */
  async trainEpisode(prompts: readonly string[], maxSteps = 5): Promise<EpisodeResult> {
    const start = prompts[Math.floor(Math.random() * prompts.length)];
    if (start === undefined) throw new TypeError('prompts: is empty; give at least one');
    if (!Number.isInteger(maxSteps) || maxSteps < 1) throw new TypeError(`maxSteps=${maxSteps}: must be 1 or more`);
    let prompt = start;
    let state = await this.embed(start);
    let totalReward = 0;
    const actions: RLAction[] = [];
    for (let step = 1; step <= maxSteps; step += 1) {
      const action = await this.selectAction(state);
      const model = this.rewardModel;
      const made = await this.backend.mutate(prompt, action.actionIndex, start, model === undefined);
      const reward = model === undefined ? made.reward : await model(prompt, made.prompt, action);
      if (reward === null) throw new Error('people rate the prompts of this server: set a reward model (setRewardModel)');
      await this.storeExperience({
        state,
        action: action.actionIndex,
        reward,
        nextState: made.embedding,
        done: step === maxSteps,
        logProb: action.logProb,
        value: action.value,
        ticket: action.ticket,
      });
      actions.push(action);
      totalReward += reward;
      prompt = made.prompt;
      state = made.embedding;
    }
    return { totalReward, steps: maxSteps, prompt: start, finalPrompt: prompt, actions };
  }

  /** Keeps a checkpoint; returns its name, which is made where none is given: a-z, 0-9 and '-'. */
  async saveCheckpoint(path?: string): Promise<string> {
    await this.ready();
    return this.backend.save(path);
  }

  /** Goes back to a checkpoint; false where there is none of the name. */
  async loadCheckpoint(path: string): Promise<boolean> {
    await this.ready();
    return this.backend.load(path);
  }

  /** Returns figures of the run; null before anything was learned. */
  async getStats(): Promise<RLStats | null> {
    await this.ready();
    return this.backend.stats();
  }

  private async start(): Promise<void> {
    if (await this.backend.isHealthy()) return;
    for (let isNew = false; ; ) {
      if (this.gateway?.isRunning !== true) {
        this.gateway = this.begun();
        isNew = true;
      }
      try {
        await this.gateway.untilHealthy(() => this.backend.isHealthy());
        return;
      } catch (error) {
        this.gateway = undefined;
        if (isNew) throw error; // else it was just ending
      }
    }
  }

  private begun(): GatewayProcess {
    return new GatewayProcess({
      pythonPath: this.config.pythonPath,
      host: this.config.serverHost,
      port: this.config.serverPort,
      stateDir: this.config.stateDir,
      args: this.config.serverArgs,
      patienceMs: this.config.startTimeoutMs,
      onLog: this.config.onServerLog,
    });
  }

  /** Starts the server with the first call, where that is wanted. */
  private async ready(): Promise<void> {
    if (!this.config.autoStartServer || this.config.simulated) return;
    if (this.gateway !== undefined && !this.gateway.isRunning) this.answered = false;
    if (!this.answered) await this.startServer();
    this.answered = true;
  }

  private checkLength(field: string, embedding: Embedding): void {
    if (Array.isArray(embedding) && embedding.length !== this.config.embeddingDim) {
      throw new TypeError(`${field}: has ${embedding.length} numbers, must have ${this.config.embeddingDim}`);
    }
  }
}
