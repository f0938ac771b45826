/**
 * A stand-in for the server, without Python: five preferences that rise with the reward of what they led to.
 *
 * Its embeddings are pseudo-random numbers of a hash, which carry no meaning: it learns which mutation is worth
 * most on the whole, never which one is worth most for a prompt.
 */

import type { Backend, Chosen } from './backend.js';
import type { ActionDistribution, Embedding, MutatedPrompt, RLExperience, RLStats, UpdateResult } from './rl-types.js';

/** The mutations, by their numbers. */
export const MUTATION_TYPES: readonly string[] = [
  'try-catch-style',
  'context-reduction',
  'expansion',
  'constraint-addition',
  'task-decomposition',
];

const ADDED = [
  'If something cannot be done, say so and suggest the nearest alternative.',
  '',
  'Go into detail, and give an example of each point.',
  'Keep to one page and to one format.',
  'Work in steps: split the task, do one part after another, then check.',
];
const WORTH = [0.2, 0.1, 0.4, 0.5, 0.3];
const LEAST = 128;
const STEP = 0.1;
const KEPT = 100;

/** See the module. */
export class SimulatedBackend implements Backend {
  private preferences = [0, 0, 0, 0, 0];
  private waiting: RLExperience[] = [];
  private returns: number[] = [];
  private running = 0;
  private updates = 0;
  private baseline = 0;
  private readonly saved = new Map<string, number[]>();
  private drawn: number;

  /** @param seed of what is drawn */
  constructor(seed = 1, private readonly size = 1536) {
    this.drawn = seed >>> 0 || 1;
  }

  isHealthy(): Promise<boolean> {
    return Promise.resolve(true);
  }

  select(_embedding: Embedding, deterministic: boolean): Promise<Chosen> {
    const probabilities = this.softmax();
    const action = deterministic ? probabilities.indexOf(Math.max(...probabilities)) : this.draw(probabilities);
    return Promise.resolve({
      action,
      mutation_type: MUTATION_TYPES[action] ?? '',
      log_prob: Math.log(probabilities[action] ?? 1),
      value: this.baseline,
      version: this.updates,
      ticket: '',
    });
  }

  store(experience: RLExperience): Promise<number> {
    this.waiting.push(experience);
    this.running += experience.reward;
    if (experience.done) {
      this.returns = [...this.returns, this.running].slice(-KEPT);
      this.running = 0;
    }
    return Promise.resolve(this.waiting.length);
  }

  update(): Promise<UpdateResult | null> {
    if (this.waiting.length < LEAST) return Promise.resolve(null);
    for (const one of this.waiting) {
      const probabilities = this.softmax();
      this.preferences = this.preferences.map(
        (old, action) =>
          old + STEP * (one.reward - this.baseline) * ((action === one.action ? 1 : 0) - (probabilities[action] ?? 0)),
      );
      this.baseline += STEP * (one.reward - this.baseline);
    }
    this.waiting = [];
    this.updates += 1;
    const entropy = -this.softmax().reduce((sum, p) => sum + p * Math.log(p), 0);
    return Promise.resolve({
      policyLoss: null,
      valueLoss: null,
      entropy,
      approxKl: null,
      clipFraction: null,
      learningRate: STEP,
      bufferSize: 0,
      updateCount: this.updates,
    });
  }

  distribution(): Promise<ActionDistribution> {
    return Promise.resolve({ probabilities: this.softmax(), mutationTypes: [...MUTATION_TYPES] });
  }

  stats(): Promise<RLStats | null> {
    if (this.returns.length === 0) return Promise.resolve(null);
    return Promise.resolve({
      totalUpdates: this.updates,
      totalEpisodes: this.returns.length,
      avgReward: this.returns.reduce((sum, one) => sum + one, 0) / this.returns.length,
      maxReward: Math.max(...this.returns),
      avgPolicyLoss: null,
      avgValueLoss: null,
      avgEntropy: null,
      avgKl: null,
    });
  }

  save(name: string | undefined): Promise<string> {
    const kept = name ?? `save-${this.saved.size + 1}`;
    this.saved.set(kept, [...this.preferences]);
    return Promise.resolve(kept);
  }

  load(name: string): Promise<boolean> {
    const found = this.saved.get(name);
    if (found !== undefined) this.preferences = [...found];
    return Promise.resolve(found !== undefined);
  }

  embed(prompt: string): Promise<Embedding> {
    let state = 2166136261;
    for (const character of prompt) state = Math.imul(state ^ (character.codePointAt(0) ?? 0), 16777619);
    const made = Array.from({ length: this.size }, () => {
      state = Math.imul(state ^ (state >>> 15), 2246822519) + 0x9e3779b9;
      return ((state >>> 0) / 2 ** 32) * 2 - 1;
    });
    const length = Math.hypot(...made) || 1;
    return Promise.resolve(made.map((one) => one / length));
  }

  async mutate(prompt: string, action: number): Promise<MutatedPrompt> {
    const text = ADDED[action] ?? '';
    const isNew = text === '' ? /\s{2,}/.test(prompt) : !prompt.includes(text);
    const made = text === '' ? prompt.replace(/\s{2,}/g, ' ') : isNew ? `${prompt}\n\n${text}` : prompt;
    return {
      prompt: made,
      mutationType: MUTATION_TYPES[action] ?? '',
      reward: isNew ? (WORTH[action] ?? 0) : 0,
      category: 'GENERAL_QA',
      embedding: await this.embed(made),
    };
  }

  private softmax(): number[] {
    const most = Math.max(...this.preferences);
    const raised = this.preferences.map((one) => Math.exp(one - most));
    const sum = raised.reduce((total, one) => total + one, 0);
    return raised.map((one) => one / sum);
  }

  private draw(probabilities: number[]): number {
    this.drawn = (Math.imul(this.drawn, 1664525) + 1013904223) >>> 0;
    let left = this.drawn / 2 ** 32;
    const found = probabilities.findIndex((one) => (left -= one) < 0);
    return found < 0 ? probabilities.length - 1 : found;
  }
}
