/** What went wrong with a call. */

/** A call that was answered with an error. */
export class PenstockError extends Error {
  override readonly name: string = 'PenstockError';

  /**
   * @param status status of HTTP
   * @param error a word for programs, such as `invalid`
   * @param detail what is wrong, and what to do
   * @param field the field of the request, where it is one
   * @param retryAfterSeconds after which to try again, where the server says so
   */
  constructor(
    readonly status: number,
    readonly error: string,
    readonly detail: string,
    readonly field: string | null = null,
    readonly retryAfterSeconds: number | null = null,
  ) {
    super(`${status} ${error}: ${detail}`);
  }
}

/** A server that was not reached, or that went away during a call: whether it heard is not known. */
export class PenstockUnreachable extends Error {
  override readonly name: string = 'PenstockUnreachable';

  constructor(
    readonly address: string,
    override readonly cause: unknown,
  ) {
    super(`${address} does not answer: ${reasonOf(cause)}`);
  }
}

function reasonOf(cause: unknown): string {
  if (!(cause instanceof Error)) return String(cause);
  const inner: unknown = cause.cause;
  return inner instanceof Error ? `${cause.message} (${inner.message})` : cause.message;
}
