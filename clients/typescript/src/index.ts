export { PenstockError, PenstockUnreachable } from './errors.js';
export { findPython } from './gateway-process.js';
export { PenstockClient } from './penstock-client.js';
export type { Answers, CallOptions, ClientOptions, Route, Routes, Takes } from './penstock-client.js';
export { RLInterface } from './rl-interface.js';
export { RLTrainer } from './rl-trainer.js';
export type { TrainingOptions, TrainingProgress, TrainingStats } from './rl-trainer.js';
export type {
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
export { MUTATION_TYPES } from './simulated.js';
