/** Calls of a gateway and of the API of prompts, typed by their OpenAPI documents. */

import { PenstockError, PenstockUnreachable } from './errors.js';
import type { GatewayRoutes } from './generated/gateway-routes.gen.js';
import type { PromptsRoutes } from './generated/prompts-routes.gen.js';

/** All routes that a client can call: those of a gateway, and those of the API of prompts. */
export type Routes = GatewayRoutes & PromptsRoutes;

/** A route by its method and path, such as `GET /api/me`. */
export type Route = keyof Routes;

type Part<Takes, Name extends string> = Takes extends Record<Name, infer Value>
  ? [Value] extends [never | undefined]
    ? object
    : { [Key in Name]: Value }
  : Takes extends Partial<Record<Name, infer Value>>
    ? [Exclude<Value, undefined>] extends [never]
      ? object
      : { [Key in Name]?: Value }
    : object;

type Parts<Takes> = Part<Takes, 'path'> & Part<Takes, 'query'> & Part<Takes, 'headers'> & Part<Takes, 'body'>;

/**
 * What a call of a route takes: what of `path`, `query`, `headers` and `body` the route has.
 *
 * Of one route after the other: all parts of all routes with one another are more than a compiler looks at.
 */
export type Takes<R extends Route> = R extends Route ? Parts<Routes[R]['takes']> : never;

/** What a call of a route answers. */
export type Answers<R extends Route> = Routes[R]['answers'];

type Arguments<R extends Route> = object extends Takes<R>
  ? [takes?: Takes<R>, options?: CallOptions]
  : [takes: Takes<R>, options?: CallOptions];

/** Options of one call. */
export interface CallOptions {
  /** Ends the call. */
  signal?: AbortSignal;
}

/** Options of a client. */
export interface ClientOptions {
  /** Address of the server, such as `http://127.0.0.1:8000`. */
  baseUrl: string;
  /** An API token of a project, where the server asks for one. */
  token?: string;
  /** The project that is meant, for a person who belongs to several. */
  project?: string;
  /** Longest time of a call in milliseconds. */
  timeoutMs?: number;
  /** Is told where the server was not reached. */
  onUnreachable?: () => void;
}

interface Plain {
  path?: Record<string, unknown>;
  query?: Record<string, unknown>;
  headers?: Record<string, unknown>;
  body?: unknown;
}

/**
 * Calls of one server.
 *
 *     const client = new PenstockClient({ baseUrl: 'http://127.0.0.1:8000', token });
 *     const me = await client.call('GET /api/me');
 *     const jobs = await client.call('GET /api/projects/{project}/jobs', { path: { project: 'alpha' } });
 */
export class PenstockClient {
  private readonly baseUrl: string;
  private readonly own: Record<string, string>;
  private readonly timeoutMs: number;
  private readonly onUnreachable: () => void;

  constructor(options: ClientOptions) {
    this.baseUrl = options.baseUrl.replace(/\/+$/, '');
    this.timeoutMs = options.timeoutMs ?? 150_000;
    this.onUnreachable = options.onUnreachable ?? ((): void => undefined);
    this.own = {};
    if (options.token !== undefined) this.own['authorization'] = `Bearer ${options.token}`;
    if (options.project !== undefined) this.own['penstock-project'] = options.project;
  }

  /**
   * Calls a route.
   *
   * @throws PenstockError for an answer that is an error, PenstockUnreachable where there is none
   */
  async call<R extends Route>(route: R, ...rest: Arguments<R>): Promise<Answers<R>> {
    const [takes, options] = rest;
    const given = (takes ?? {}) as Plain;
    const [method, place] = route.split(' ', 2) as [string, string];
    const url = this.baseUrl + filled(place, given.path ?? {}) + asked(given.query ?? {});
    const headers: Record<string, string> = { ...this.own, accept: 'application/json' };
    for (const [name, value] of Object.entries(given.headers ?? {})) {
      if (value !== undefined && value !== null) headers[name] = String(value);
    }
    const request: RequestInit = { method, headers, signal: this.signal(options?.signal) };
    if (given.body !== undefined) {
      headers['content-type'] = 'application/json';
      request.body = JSON.stringify(given.body);
    } else if (method !== 'GET') {
      headers['content-type'] = 'application/json';
    }
    return (await this.answer(url, request)) as Answers<R>;
  }

  private signal(given: AbortSignal | undefined): AbortSignal {
    const timeout = AbortSignal.timeout(this.timeoutMs);
    return given === undefined ? timeout : AbortSignal.any([timeout, given]);
  }

  private async answer(url: string, request: RequestInit): Promise<unknown> {
    let status: number, text: string, kind: string, after: string | null;
    try {
      const reply = await fetch(url, request);
      text = await reply.text();
      status = reply.status;
      kind = reply.headers.get('content-type') ?? '';
      after = reply.headers.get('retry-after');
    } catch (cause) {
      this.onUnreachable();
      throw new PenstockUnreachable(this.baseUrl, cause);
    }
    const content: unknown = kind.startsWith('application/json') ? JSON.parse(text) : text;
    if (status >= 200 && status < 300) return content;
    throw errorOf(status, content, after);
  }
}

function errorOf(status: number, content: unknown, after: string | null): PenstockError {
  const told = (typeof content === 'object' && content !== null ? content : {}) as Record<string, unknown>;
  const field = typeof told['field'] === 'string' ? told['field'] : null;
  const word = typeof told['error'] === 'string' ? told['error'] : 'error';
  const detail = typeof told['detail'] === 'string' ? told['detail'] : String(content).slice(0, 500);
  return new PenstockError(status, word, detail, field, after === null ? null : Number(after));
}

function filled(place: string, parts: Record<string, unknown>): string {
  return place.replace(/\{(\w+)\}/g, (_, name: string) => {
    const value = parts[name];
    if (value === undefined || value === '') throw new TypeError(`path.${name}: is missing`);
    return encodeURIComponent(String(value));
  });
}

function asked(query: Record<string, unknown>): string {
  const made = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null) made.append(name, String(value));
  }
  const text = made.toString();
  return text === '' ? '' : `?${text}`;
}
