/** What an interface to a policy of prompts takes and gives. */

/** An embedding: 1,536 numbers, or base64 of as many float32, little-endian, which is a quarter as long. */
export type Embedding = number[] | string;

/** A mutation that was chosen. */
export interface RLAction {
  /** Its number, 0 to 4. */
  actionIndex: number;
  mutationType: string;
  /** How likely it was. */
  probability: number;
  logProb: number;
  /** What the critic expects from here on. */
  value: number;
  /** Version of the policy that chose it. */
  version: number;
  /** Says which answer a transition belongs to. */
  ticket: string;
}

/** A transition: what was done in a state, and what came of it. */
export interface RLExperience {
  state: Embedding;
  action: number;
  reward: number;
  nextState: Embedding;
  done: boolean;
  logProb: number;
  value: number;
  ticket?: string;
}

/** How an interface reaches its server, and whether it starts it. */
export interface RLConfig {
  serverHost: string;
  serverPort: number;
  /** Interpreter that has Penstock installed; default: of a `.venv` here or above, else `python3`. */
  pythonPath: string;
  embeddingDim: number;
  /** Whether the first call starts the server where none answers. */
  autoStartServer: boolean;
  /** A token of the project, for a server on another machine. */
  token: string;
  /** Folder of the run that a started server has; the same folder goes on with the same run. */
  stateDir: string;
  /** More words for `penstock gateway prompts`. */
  serverArgs: readonly string[];
  /** Longest wait for the server to be healthy, and to drain, in milliseconds. */
  startTimeoutMs: number;
  /** Is told each line that a started server writes. */
  onServerLog: (line: string) => void;
  /** Whether nothing is learned anywhere: a stand-in for the server, without Python. */
  simulated: boolean;
}

/** Figures of an update. */
export interface UpdateResult {
  policyLoss: number | null;
  valueLoss: number | null;
  entropy: number | null;
  approxKl: number | null;
  clipFraction: number | null;
  learningRate: number | null;
  bufferSize: number;
  updateCount: number;
}

/** Figures of a run. */
export interface RLStats {
  totalUpdates: number;
  totalEpisodes: number;
  avgReward: number | null;
  maxReward: number | null;
  avgPolicyLoss: number | null;
  avgValueLoss: number | null;
  avgEntropy: number | null;
  avgKl: number | null;
}

/** How likely each mutation is, by its number. */
export interface ActionDistribution {
  probabilities: number[];
  mutationTypes: string[];
}

/** A prompt that a mutation has made. */
export interface MutatedPrompt {
  prompt: string;
  mutationType: string;
  /** What the step is worth; null where people rate prompts, or a reward model does. */
  reward: number | null;
  category: string;
  embedding: Embedding;
}

/** What a step is worth: a prompt, what a mutation made of it, and the mutation. */
export type RewardModel = (before: string, after: string, action: RLAction) => number | Promise<number>;

/** An episode that was played. */
export interface EpisodeResult {
  totalReward: number;
  steps: number;
  prompt: string;
  finalPrompt: string;
  actions: RLAction[];
}
