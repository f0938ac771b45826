/** Trains a policy of prompts: episodes, and updates between them. */

import { RLInterface } from './rl-interface.js';
import type { EpisodeResult, RLConfig, UpdateResult } from './rl-types.js';

/** How far a training is. */
export interface TrainingProgress {
  /** Episodes that were played. */
  episode: number;
  numEpisodes: number;
  /** Mean reward of the last 100 episodes. */
  avgReward: number;
  last: EpisodeResult;
  /** Figures of the update after this episode; null where there was none. */
  update: UpdateResult | null;
}

/** Options of a training. */
export interface TrainingOptions {
  prompts: readonly string[];
  numEpisodes?: number;
  episodeLength?: number;
  /** Episodes between two updates. */
  updateInterval?: number;
  /** Episodes that are played at the same time. */
  parallel?: number;
  onProgress?: (progress: TrainingProgress) => void;
}

/** What a training came to. */
export interface TrainingStats {
  /** Mean reward of all episodes. */
  avgReward: number;
  maxReward: number;
  /** Reward of each episode, in the order in which they ended. */
  rewards: number[];
  episodes: number;
  updates: number;
}

const RECENT = 100;

/**
 * A training.
 *
 *     const trainer = new RLTrainer();
 *     await trainer.start();
 *     const stats = await trainer.train(prompts, 100, 5, 10);
 *     await trainer.stop();
 */
export class RLTrainer {
  readonly rl: RLInterface;

  constructor(rl: RLInterface | Partial<RLConfig> = {}) {
    this.rl = rl instanceof RLInterface ? rl : new RLInterface(rl);
  }

  /** Starts the server, unless one answers. */
  async start(): Promise<void> {
    if (!this.rl.config.simulated) await this.rl.startServer();
  }

  /** Ends the server that was started here, once it has drained. */
  async stop(): Promise<void> {
    await this.rl.stopServer();
  }

  /** Plays episodes and learns from them. */
  async train(
    prompts: readonly string[],
    numEpisodes?: number,
    episodeLength?: number,
    updateInterval?: number,
    onProgress?: (progress: TrainingProgress) => void,
  ): Promise<TrainingStats>;
  async train(options: TrainingOptions): Promise<TrainingStats>;
  async train(
    given: readonly string[] | TrainingOptions,
    numEpisodes = 100,
    episodeLength = 5,
    updateInterval = 10,
    onProgress?: (progress: TrainingProgress) => void,
  ): Promise<TrainingStats> {
    const options = isOptions(given) ? given : { prompts: given, numEpisodes, episodeLength, updateInterval };
    const training = new Training(this.rl, {
      numEpisodes: 100,
      episodeLength: 5,
      updateInterval: 10,
      parallel: 1,
      onProgress: onProgress ?? ((): void => undefined),
      ...options,
    });
    return training.run();
  }
}

class Training {
  private readonly rewards: number[] = [];
  private updates = 0;

  constructor(
    private readonly rl: RLInterface,
    private readonly options: Required<TrainingOptions>,
  ) {
    for (const name of ['numEpisodes', 'episodeLength', 'updateInterval', 'parallel'] as const) {
      const value = options[name];
      if (!Number.isInteger(value) || value < 1) throw new TypeError(`${name}=${value}: must be 1 or more`);
    }
  }

  async run(): Promise<TrainingStats> {
    const { numEpisodes, updateInterval } = this.options;
    while (this.rewards.length < numEpisodes) {
      // An update is a flush, which ends chains: so all episodes before it are over.
      await this.play(Math.min(updateInterval, numEpisodes - this.rewards.length));
    }
    const sum = this.rewards.reduce((total, one) => total + one, 0);
    return {
      avgReward: sum / this.rewards.length,
      maxReward: this.rewards.reduce((most, one) => Math.max(most, one), -Infinity),
      rewards: this.rewards,
      episodes: this.rewards.length,
      updates: this.updates,
    };
  }

  private async play(count: number): Promise<void> {
    let left = count;
    let last: EpisodeResult | undefined;
    const player = async (): Promise<void> => {
      while (left > 0) {
        left -= 1;
        const played = await this.rl.trainEpisode(this.options.prompts, this.options.episodeLength);
        this.rewards.push(played.totalReward);
        if (last !== undefined) this.tell(last, null);
        last = played;
      }
    };
    await Promise.all(Array.from({ length: Math.min(this.options.parallel, count) }, player));
    const update = await this.rl.update();
    this.updates += update === null ? 0 : 1;
    if (last !== undefined) this.tell(last, update);
  }

  private tell(last: EpisodeResult, update: UpdateResult | null): void {
    const recent = this.rewards.slice(-RECENT);
    this.options.onProgress({
      episode: this.rewards.length,
      numEpisodes: this.options.numEpisodes,
      avgReward: recent.reduce((total, one) => total + one, 0) / recent.length,
      last,
      update,
    });
  }
}

function isOptions(given: readonly string[] | TrainingOptions): given is TrainingOptions {
  return !Array.isArray(given);
}
