"""The yardstick of an API over HTTP: FastAPI that reads an embedding and answers with a constant.

python -m benchmarks.bare_fastapi PORT     serves on loopback until it is killed
"""

import sys

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

app = FastAPI(openapi_url=None)


class Asked(BaseModel):
    """What is sent: an embedding, as numbers or as a text."""

    embedding: list[float] | str


class Answered(BaseModel):
    """What is answered, of the size that the API of prompts answers with."""

    action: int = 1
    mutation_type: str = "context-reduction"
    log_prob: float = -1.609438
    value: float = 0.123456
    version: int = 12
    ticket: str = "0123456789abcdef01234567"


@app.post("/select_action")
async def select_action(body: Asked) -> Answered:
    """Answer with a constant."""
    del body
    return Answered()


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), http="h11", log_level="warning")
