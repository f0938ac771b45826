// A client of PolicyService for a policy that sees one array of float32 and answers with one integer.
//
// Every call ends by its deadline. What may not have been heard is sent again under the same
// request_id; OVERLOADED is waited out; any other refusal is a Refused error with its reason.

import { randomUUID } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

import grpc from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';

const PROTOS = fileURLToPath(new URL('../../protos', import.meta.url));
const { penstock } = grpc.loadPackageDefinition(
  loadSync('penstock/v1/policy.proto', {
    includeDirs: [PROTOS],
    keepCase: true,
    longs: Number,
    enums: String,
    defaults: true,
    oneofs: true,
  }),
);

const REPEATABLE = new Set([
  grpc.status.UNAVAILABLE,
  grpc.status.DEADLINE_EXCEEDED,
  grpc.status.CANCELLED,
  grpc.status.ABORTED,
  grpc.status.INTERNAL,
  grpc.status.UNKNOWN,
]);
const LONGEST_PAUSE_MS = 1000;

export class Refused extends Error {
  constructor({ reason, detail }) {
    super(`${reason}: ${detail}`);
    this.reason = reason;
  }
}

export class PolicyClient {
  constructor(address, { deadlineMs = 5000, credentials = grpc.credentials.createInsecure() } = {}) {
    this.deadlineMs = deadlineMs;
    this.stub = new penstock.v1.PolicyService(address, credentials, { 'grpc.enable_retries': 0 });
  }

  // Spaces, versions and limits; throws for spaces that this example does not speak.
  async describe() {
    const description = await this.call('Describe', {});
    const { observation_space: seen, action_space: done } = description;
    if (seen.box?.low?.dtype !== 'float32' || !done.discrete) {
      throw new Error(`this client speaks Box(float32) and Discrete, not ${seen.kind} and ${done.kind}`);
    }
    return description;
  }

  // { episode_id, arm, learned }.
  startEpisode(learned) {
    return this.call('StartEpisode', { request_id: randomUUID(), not_learned: !learned });
  }

  // The action of a step; `reward` is that of the step before, undefined for the first.
  async act(episode_id, step, observation, reward) {
    const reply = await this.call('Act', {
      request_id: randomUUID(),
      episode_id,
      step,
      reward,
      observation: [part(observation)],
    });
    return Number(reply.action[0].value.data.readBigInt64LE(0));
  }

  // { total_return, length }; `reward` is that of the last step.
  endEpisode(episode_id, { observation, reward, terminated }) {
    return this.call('EndEpisode', {
      request_id: randomUUID(),
      episode_id,
      reward,
      ending: terminated ? 'ENDING_TERMINATED' : 'ENDING_TRUNCATED',
      final_observation: [part(observation)],
    });
  }

  close() {
    this.stub.close();
  }

  async call(method, request) {
    const endsMs = Date.now() + this.deadlineMs;
    for (let attempt = 0; ; attempt += 1) {
      const { error, reply } = await this.attempt(method, request, endsMs);
      const refusal = reply?.refusal;
      if (!error && !refusal) return reply;
      const isRepeatable = error ? REPEATABLE.has(error.code) : refusal.reason === 'REASON_OVERLOADED';
      const pauseMs = (refusal?.retry_after_ms ?? 0) + jitterMs(attempt);
      if (!isRepeatable || Date.now() + pauseMs >= endsMs) throw error ?? new Refused(refusal);
      await sleep(pauseMs);
    }
  }

  // One attempt: silence is waited for half of the deadline.
  attempt(method, request, endsMs) {
    const deadline = Math.min(endsMs, Date.now() + this.deadlineMs / 2);
    return new Promise((resolve) => {
      this.stub[method](request, { deadline }, (error, reply) => resolve({ error, reply }));
    });
  }
}

function part(numbers) {
  const data = Buffer.from(numbers.buffer, numbers.byteOffset, numbers.byteLength);
  return { path: '', value: { dtype: 'float32', shape: [numbers.length], data } };
}

function jitterMs(attempt) {
  return Math.random() * Math.min(LONGEST_PAUSE_MS, 50 * 2 ** attempt);
}
