// A client of TextService: answers of a language model that learns from the conversations it has.
//
//   const conversation = await client.startConversation();
//   const reply = await conversation.generate(messages, { tools });
//   messages.push(reply.answers[0].message);
//   await conversation.end(1);

import { randomUUID } from 'node:crypto';

import grpc from '@grpc/grpc-js';

import { Calls, Refused, penstock } from './calls.js';

export { Refused } from './calls.js';

export class TextClient {
  constructor(address, { deadlineMs = 60_000, credentials = grpc.credentials.createInsecure() } = {}) {
    this.calls = new Calls(penstock.v1.TextService, address, credentials, deadlineMs);
  }

  // Versions and limits.
  describe() {
    return this.calls.call('Describe', {});
  }

  // The answer to messages, without memory; fields as in GenerateRequest.
  generate(messages, fields = {}) {
    return this.calls.call('Generate', request(messages, fields), 1);
  }

  // The same name names the same conversation; a client key decides its arm.
  async startConversation({ name = randomUUID(), clientKey = '', learned = true } = {}) {
    const begun = { request_id: name, client_key: clientKey, not_learned: !learned };
    return new Conversation(this.calls, await this.calls.call('StartConversation', begun));
  }

  close() {
    this.calls.close();
  }
}

export class Conversation {
  constructor(calls, { conversation_id, arm, learned }) {
    Object.assign(this, { calls, conversation_id, arm, learned });
  }

  // The answer to all messages so far.
  generate(messages, fields = {}) {
    return this.calls.call('Generate', request(messages, { ...fields, conversation_id: this.conversation_id }), 1);
  }

  // The same as it grows: { index, text } of each part, then { reply }.
  async *stream(messages, fields = {}) {
    const asked = request(messages, { ...fields, conversation_id: this.conversation_id });
    for await (const part of this.calls.stream('GenerateStream', asked)) {
      if (part.reply?.refusal) throw new Refused(part.reply.refusal);
      yield part;
    }
  }

  // Adds to the reward of a turn, the newest where none is named; how many came too late.
  async reward(amount, turn = undefined) {
    const rewards = [turn === undefined ? { amount } : { amount, turn }];
    const asked = { conversation_id: this.conversation_id, request_id: randomUUID(), rewards };
    return (await this.calls.call('Reward', asked)).late;
  }

  // { total_return, turns }; `reward` is that of the newest turn.
  end(reward = undefined) {
    const ending = 'ENDING_TERMINATED';
    const asked = { conversation_id: this.conversation_id, request_id: randomUUID(), ending };
    return this.calls.call('EndConversation', reward === undefined ? asked : { ...asked, reward });
  }
}

function request(messages, { tools = [], ...fields }) {
  return { request_id: randomUUID(), messages, tools: tools.map((tool) => JSON.stringify(tool)), ...fields };
}
