// A client of PolicyService for a policy that sees one array of float32 and answers with one integer.
// How its calls are repeated stands in calls.js.

import { randomUUID } from 'node:crypto';

import grpc from '@grpc/grpc-js';

import { Calls, penstock } from './calls.js';

export { Refused } from './calls.js';

export class PolicyClient {
  constructor(address, { deadlineMs = 5000, credentials = grpc.credentials.createInsecure() } = {}) {
    this.calls = new Calls(penstock.v1.PolicyService, address, credentials, deadlineMs);
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
    this.calls.close();
  }

  call(method, request) {
    return this.calls.call(method, request);
  }
}

function part(numbers) {
  const data = Buffer.from(numbers.buffer, numbers.byteOffset, numbers.byteLength);
  return { path: '', value: { dtype: 'float32', shape: [numbers.length], data } };
}
