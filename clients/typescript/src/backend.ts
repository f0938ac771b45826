/** What an interface asks: a server over HTTP, or a stand-in without one. */

import { PenstockError, PenstockUnreachable } from './errors.js';
import { type Answers, PenstockClient } from './penstock-client.js';
import type { ActionDistribution, Embedding, MutatedPrompt, RLExperience, RLStats, UpdateResult } from './rl-types.js';

/** An answer to a choice, without its probability. */
export type Chosen = Answers<'POST /select_action'>;

/** Whatever chooses mutations and learns from transitions. */
export interface Backend {
  isHealthy(): Promise<boolean>;
  select(embedding: Embedding, deterministic: boolean): Promise<Chosen>;
  store(experience: RLExperience): Promise<number>;
  update(): Promise<UpdateResult | null>;
  distribution(embedding: Embedding): Promise<ActionDistribution>;
  stats(): Promise<RLStats | null>;
  save(name: string | undefined): Promise<string>;
  load(name: string): Promise<boolean>;
  embed(prompt: string): Promise<Embedding>;
  /** rewarded: whether the answer says what the step is worth. */
  mutate(prompt: string, action: number, start: string, rewarded: boolean): Promise<MutatedPrompt>;
}

const NOT_FOUND = 404;
const TOO_MANY = 429;
const ATTEMPTS = 20;

/** The API of prompts over HTTP. Embeddings that it makes are base64, which is shorter to send. */
export class HttpBackend implements Backend {
  constructor(private readonly client: PenstockClient) {}

  async isHealthy(): Promise<boolean> {
    try {
      await this.client.call('GET /health');
      return true;
    } catch (error) {
      if (error instanceof PenstockError || error instanceof PenstockUnreachable) return false;
      throw error;
    }
  }

  async select(embedding: Embedding, deterministic: boolean): Promise<Chosen> {
    return this.client.call('POST /select_action', { body: { embedding, deterministic } });
  }

  /** Stores a transition; waits where the server says that too many wait for an update. */
  async store(experience: RLExperience): Promise<number> {
    const body = {
      state: experience.state,
      action: experience.action,
      reward: experience.reward,
      next_state: experience.nextState,
      done: experience.done,
      log_prob: experience.logProb,
      value: experience.value,
      ticket: experience.ticket ?? '',
    };
    for (let attempt = 1; ; attempt += 1) {
      try {
        return (await this.client.call('POST /store_experience', { body })).buffer_size;
      } catch (error) {
        if (!(error instanceof PenstockError) || error.status !== TOO_MANY || attempt === ATTEMPTS) throw error;
        const waitS = error.retryAfterSeconds ?? 1;
        await new Promise((resolve) => setTimeout(resolve, 1000 * waitS));
      }
    }
  }

  async update(): Promise<UpdateResult | null> {
    const made = await this.client.call('POST /update');
    if ('message' in made) return null;
    return {
      policyLoss: made.policy_loss,
      valueLoss: made.value_loss,
      entropy: made.entropy,
      approxKl: made.approx_kl,
      clipFraction: made.clip_fraction,
      learningRate: made.learning_rate,
      bufferSize: made.buffer_size,
      updateCount: made.update_count,
    };
  }

  async distribution(embedding: Embedding): Promise<ActionDistribution> {
    const made = await this.client.call('POST /get_distribution', { body: { embedding } });
    return { probabilities: made.probabilities, mutationTypes: made.mutation_types };
  }

  async stats(): Promise<RLStats | null> {
    const made = await this.client.call('GET /stats');
    if ('message' in made) return null;
    return {
      totalUpdates: made.total_updates,
      totalEpisodes: made.total_episodes,
      avgReward: made.avg_reward,
      maxReward: made.max_reward,
      avgPolicyLoss: made.avg_policy_loss,
      avgValueLoss: made.avg_value_loss,
      avgEntropy: made.avg_entropy,
      avgKl: made.avg_kl,
    };
  }

  async save(name: string | undefined): Promise<string> {
    return (await this.client.call('POST /save', { body: name === undefined ? {} : { path: name } })).path;
  }

  async load(name: string): Promise<boolean> {
    try {
      return (await this.client.call('POST /load', { body: { path: name } })).loaded;
    } catch (error) {
      if (error instanceof PenstockError && error.status === NOT_FOUND) return false;
      throw error;
    }
  }

  async embed(prompt: string): Promise<Embedding> {
    return (await this.client.call('POST /embed', { body: { prompt, encoding: 'base64' } })).embedding;
  }

  async mutate(prompt: string, action: number, start: string, rewarded: boolean): Promise<MutatedPrompt> {
    const body = { prompt, action, start, rewarded, encoding: 'base64' as const };
    const made = await this.client.call('POST /mutate', { body });
    return {
      prompt: made.prompt,
      mutationType: made.mutation_type,
      reward: made.reward,
      category: made.category,
      embedding: made.embedding ?? '',
    };
  }
}
