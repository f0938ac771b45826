/** `penstock gateway prompts` as a process of this program. */

import { type ChildProcess, spawn } from 'node:child_process';
import { existsSync } from 'node:fs';
import { dirname, join, resolve as absolute } from 'node:path';

/** How a gateway is started. */
export interface GatewayOptions {
  /** Interpreter that has Penstock installed. */
  pythonPath: string;
  host: string;
  port: number;
  /** Folder of the run; the same folder goes on with the same run. */
  stateDir: string;
  /** More words of the command line. */
  args: readonly string[];
  /** Longest time until it is healthy, and until it has drained, in milliseconds. */
  patienceMs: number;
  /** Is told each line that the gateway writes. */
  onLog: (line: string) => void;
}

const LOOK_MS = 100;
const KEPT_LINES = 40;

/** A gateway that was started here. */
export class GatewayProcess {
  private readonly child: ChildProcess;
  private readonly lines: string[] = [];
  private readonly ended: Promise<void>;
  private failure = '';

  constructor(private readonly options: GatewayOptions) {
    const words = ['gateway', 'prompts', '--listen', `${options.host}:${options.port}`];
    words.push('--state', options.stateDir, ...options.args);
    // -P: no file of the working folder hides a module of the installation.
    this.child = spawn(options.pythonPath, ['-P', '-m', 'penstock.launch.cli', ...words], {
      stdio: ['ignore', 'pipe', 'pipe'],
    });
    this.child.stdout?.on('data', (data: Buffer) => this.note(data));
    this.child.stderr?.on('data', (data: Buffer) => this.note(data));
    this.ended = new Promise((resolve) => {
      this.child.once('error', (error) => {
        this.failure = `${options.pythonPath} cannot be started: ${error.message}; set pythonPath`;
        resolve();
      });
      this.child.once('exit', (code, signal) => {
        this.failure ||= `it ended with ${signal ?? `code ${code}`}`;
        resolve();
      });
    });
  }

  /** Whether its process lives. */
  get isRunning(): boolean {
    return this.failure === '';
  }

  /** Number of its process; undefined where none could be started. */
  get pid(): number | undefined {
    return this.child.pid;
  }

  /**
   * Waits until it is healthy.
   *
   * @throws Error with the last lines that it wrote, where it ends or is not healthy in time
   */
  async untilHealthy(isHealthy: () => Promise<boolean>): Promise<void> {
    const until = Date.now() + this.options.patienceMs;
    while (!(await isHealthy())) {
      if (!this.isRunning) throw new Error(`the gateway has ended: ${this.failure}\n${this.said()}`);
      if (Date.now() > until) {
        await this.stop();
        throw new Error(`the gateway was not healthy within ${this.options.patienceMs} ms\n${this.said()}`);
      }
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    }
  }

  /** Asks it to drain, and waits until it has; ends it where it does not in time. */
  async stop(): Promise<void> {
    if (!this.isRunning) return;
    this.child.kill('SIGTERM');
    const timer = setTimeout(() => this.child.kill('SIGKILL'), this.options.patienceMs);
    await this.ended;
    clearTimeout(timer);
  }

  private said(): string {
    return this.lines.join('\n');
  }

  private note(data: Buffer): void {
    for (const line of data.toString('utf8').split('\n')) {
      if (line.trim() === '') continue;
      this.lines.push(line);
      if (this.lines.length > KEPT_LINES) this.lines.shift();
      this.options.onLog(line);
    }
  }
}

/** The interpreter that is meant: of a virtual environment in this folder or one above, else `fallback`. */
export function findPython(fallback = 'python3', from: string = process.cwd()): string {
  const active = process.env['VIRTUAL_ENV'];
  if (active !== undefined && active !== '') return join(active, 'bin', 'python');
  for (let folder = absolute(from); ; folder = dirname(folder)) {
    const found = join(folder, '.venv', 'bin', 'python');
    if (existsSync(found)) return found;
    if (folder === dirname(folder)) return fallback;
  }
}
