// Calls of a service of Penstock, as a client in any language makes them.
//
// Every call ends by its deadline. What may not have been heard is sent again under the same
// request_id; OVERLOADED is waited out; any other refusal is a Refused error with its reason.

import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

import grpc from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';

const PROTOS = fileURLToPath(new URL('../../protos', import.meta.url));
export const { penstock } = grpc.loadPackageDefinition(
  loadSync(['penstock/v1/policy.proto', 'penstock/v1/text.proto'], {
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

export class Calls {
  constructor(Service, address, credentials, deadlineMs) {
    this.deadlineMs = deadlineMs;
    this.stub = new Service(address, credentials, { 'grpc.enable_retries': 0 });
  }

  close() {
    this.stub.close();
  }

  // The reply of a call; `share` of the deadline is waited for each attempt.
  async call(method, request, share = 0.5) {
    const endsMs = Date.now() + this.deadlineMs;
    for (let attempt = 0; ; attempt += 1) {
      const { error, reply } = await this.attempt(method, request, endsMs, share);
      const refusal = reply?.refusal;
      if (!error && !refusal) return reply;
      const isRepeatable = error ? REPEATABLE.has(error.code) : refusal.reason === 'REASON_OVERLOADED';
      const pauseMs = (refusal?.retry_after_ms ?? 0) + jitterMs(attempt);
      if (!isRepeatable || Date.now() + pauseMs >= endsMs) throw error ?? new Refused(refusal);
      await sleep(pauseMs);
    }
  }

  attempt(method, request, endsMs, share) {
    const deadline = Math.min(endsMs, Date.now() + this.deadlineMs * share);
    return new Promise((resolve) => {
      this.stub[method](request, { deadline }, (error, reply) => resolve({ error, reply }));
    });
  }

  // The parts of a stream; it is cancelled when the loop over them is left.
  async *stream(method, request) {
    const call = this.stub[method](request, { deadline: Date.now() + this.deadlineMs });
    try {
      yield* call;
    } finally {
      call.cancel();
    }
  }
}

function jitterMs(attempt) {
  return Math.random() * Math.min(LONGEST_PAUSE_MS, 50 * 2 ** attempt);
}
