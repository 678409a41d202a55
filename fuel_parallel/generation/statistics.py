"""What an engine did, and how fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from fuel_parallel.generation.scheduler import SchedulerStatistics


@dataclass
class GenerationStatistics:
    """Of an engine, on rank 0.

    Args:
        scheduler: What was computed, in tokens and pages.
        generated_tokens: Tokens that were drawn.
        first_token_seconds: For each request, from `submit` to its first token.
        seconds: Of all steps.
        num_pages: Pages of the cache, of `page_bytes` each on this rank.
    """

    scheduler: SchedulerStatistics
    num_pages: int
    page_bytes: int = 0
    generated_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """The figures, a line each.

        >>> print(GenerationStatistics(SchedulerStatistics(prompt_tokens=8, reused_tokens=4), 10).lines()[2])
        prefix hits   4 of 8 prompt tokens, 50.0 %
        """
        did, first = self.scheduler, self.first_token_seconds
        rate = self.generated_tokens / self.seconds if self.seconds else 0.0
        hits = 100 * did.reused_tokens / did.prompt_tokens if did.prompt_tokens else 0.0
        times = f"{1e3 * median(first):.1f} ms median, {1e3 * max(first):.1f} ms most" if first else "none"
        peak, most = did.peak_pages * self.page_bytes, self.num_pages * self.page_bytes
        return [
            f"tokens        {self.generated_tokens} in {self.seconds:.3f} s, {rate:.1f} tokens/s",
            f"first token   {times}",
            f"prefix hits   {did.reused_tokens} of {did.prompt_tokens} prompt tokens, {hits:.1f} %",
            f"computed      {did.prefill_tokens} tokens of prompts, {did.decode_tokens} others, in {did.steps} steps",
            f"pages         {did.peak_pages} of {self.num_pages} at the peak, {peak:,} of {most:,} bytes a rank",
            f"preemptions   {did.preemptions}",
        ]
