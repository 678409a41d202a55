"""`PipelineRunner`: a schedule, run on the stages of this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fuel_parallel.comm.communicator import Communicator, ReduceOp
from fuel_parallel.comm.posted import PostedReceive
from fuel_parallel.data_parallel.gradients import average_gradients
from fuel_parallel.errors import ArgumentError, ScheduleError
from fuel_parallel.lazy.node import Spec
from fuel_parallel.lazy.ops import creation, manipulation
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Module, Parameter
from fuel_parallel.pipeline_parallel.actions import Action, ActionKind
from fuel_parallel.pipeline_parallel.all_forward import forward_only
from fuel_parallel.pipeline_parallel.check import check
from fuel_parallel.pipeline_parallel.dependencies import partner
from fuel_parallel.pipeline_parallel.lower import with_reductions
from fuel_parallel.pipeline_parallel.run.batch import Batch
from fuel_parallel.pipeline_parallel.run.links import Links
from fuel_parallel.pipeline_parallel.run.recording import recording
from fuel_parallel.pipeline_parallel.run.result import PipelineResult
from fuel_parallel.pipeline_parallel.run.stage import Loss, StageRun
from fuel_parallel.pipeline_parallel.run.tied import TiedParameters
from fuel_parallel.pipeline_parallel.schedule import Schedule

Array = Any

POSTED_AHEAD = 3
"""For how many of the actions to come receives are posted: each holds the memory of its message."""


class PipelineRunner:
    """Runs a schedule on the stages of this rank: forwards, backwards, and the messages between.

    Making one is collective over `comm`, and so is each `step`. The schedule is proven first; where it has messages of
    its own these are left out, for a message is sent as soon as it is made, and its receive posted some actions ahead.

    Args:
        stages: The modules of the stages that the schedule gives to this rank, by their numbers. Each is called with
            the tensors that the one before it returns, a tensor or a tuple of them; the first with those of the batch.
        schedule: As many ranks as `comm` has.
        comm: The ranks of this pipeline, such as `mesh["pp"]`.
        loss: `loss(output, targets)` of a micro-batch: a floating scalar, the mean over its rows. On the rank of the
            last stage; needed if the schedule has a backward.
        dp: The ranks that have the same stages and other rows, such as `mesh["dp"]`: gradients and losses are averaged
            over them.
        recompute: Whether a backward first computes the stage's forward again: in flight, micro-batches then hold the
            input of a stage, and the values of its collectives, only (Chen et al., 2016, arXiv:1604.06174).
        tied: Parameters that other ranks of the pipeline have copies of, by a name that all of these give: an embedding
            on the first stage that is the head of the last. They become equal here, and get the sum of the gradients.

    Raises `ScheduleError` when the schedule cannot run, `ArgumentError` when stages and schedule do not go together.

    >>> import fuel_parallel as fp, fuel_parallel.lazy as ft
    >>> from fuel_parallel.pipeline_parallel import build
    >>> layer = fp.Linear(2, 1, ft.random.Generator(0))
    >>> square = lambda output, targets: ft.mean((output - targets) ** 2)
    >>> runner = PipelineRunner({0: layer}, build("1f1b", 1, 4), fp.IdentityComm(), loss=square)
    >>> x, y = ft.ones((8, 2)), ft.zeros((8, 1))
    >>> result = runner.step(x, y)
    >>> abs(result.loss.item() - square(layer(x), y).item()) < 1e-6, len(result.gradients)
    (True, 2)
    """

    def __init__(
        self,
        stages: Mapping[int, Module],
        schedule: Schedule,
        comm: Communicator,
        *,
        loss: Loss | None = None,
        dp: Communicator | None = None,
        recompute: bool = False,
        tied: Mapping[str, Parameter] | None = None,
    ) -> None:
        _check(stages, schedule, comm)
        check(schedule)
        self.schedule = with_reductions(schedule.computation()) if schedule.has_backward else schedule.computation()
        self.comm = comm.group(range(comm.world_size), "pipeline")
        self.dp = dp
        last = schedule.num_stages - 1
        self._has_loss: bool = self.comm.broadcast_object(loss is not None, schedule.placement[-1], type=bool)
        if loss is None and last in stages and schedule.has_backward:
            raise ArgumentError(
                f"PipelineRunner: rank {comm.rank} has the last stage, and {schedule.name} has a backward: give loss=, "
                "a function of the output and the targets of a micro-batch"
            )
        self._runs = {
            number: StageRun(
                stages[number], loss=loss if number == last else None, is_first=number == 0, recompute=recompute
            )
            for number in sorted(stages)
        }
        self._recording = recording(self.schedule, self.comm)
        self._links = Links(self.comm, self.schedule, {n: run.device for n, run in self._runs.items()})
        self._tied = TiedParameters(self.comm, tied or {}, self.parameters())
        self._do: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.BACKWARD_INPUT: self._backward,
            ActionKind.BACKWARD_WEIGHT: self._backward_weight,
            ActionKind.REDUCE_GRAD: self._reduce,
        }
        self._made: dict[Action, list[Array]] = {}
        self._gradients: dict[Parameter, Tensor] = {}
        self._last: PipelineResult | None = None

    def parameters(self) -> list[Parameter]:
        """The parameters of the stages of this rank, each once."""
        return list({id(p): p for run in self._runs.values() for p in run.parameters}.values())

    def step(self, inputs: Any = None, targets: Any = None) -> PipelineResult:
        """Runs the schedule once on a batch: its loss and its gradients.

        Args:
            inputs: The batch on the rank of the first stage: a tensor or an array, or a tuple of them, which are cut
                into micro-batches along dimension 0, of as equal sizes as can be.
            targets: On the rank of the last stage what `loss` is given, any nest of them, cut in the same way.

        Raises `ArgumentError` when the batch is missing, has fewer rows than there are micro-batches, or `targets`
        have another number of rows; `ScheduleError` when the schedule has no backward.
        """
        if not self.schedule.has_backward:
            raise ScheduleError(
                f"PipelineRunner.step: {self.schedule.name} has no backward; call evaluate or predict, or take a "
                "schedule that trains, such as 1f1b"
            )
        self._begin(inputs, targets, wants_loss=True, trains=True)
        self._run(self.schedule)
        gradients = self._tied.summed([self._gradients.pop(parameter) for parameter in self.parameters()])
        if self.dp is not None:
            gradients = average_gradients(gradients, self.dp)
        self._last = PipelineResult(gradients, *self._mean_loss())
        return self._last

    def evaluate(self, inputs: Any = None, targets: Any = None) -> Tensor:
        """The mean loss of a batch, without gradients, float64, on every rank. Like `step` otherwise.

        A batch of fewer rows than the schedule has micro-batches is cut into as many as it has rows.
        """
        if not self._has_loss:
            raise ArgumentError("PipelineRunner.evaluate: the runner was made without loss= on the last stage's rank")
        self._begin(inputs, targets, wants_loss=True)
        self._run_forward()
        return PipelineResult([], *self._mean_loss()).loss

    def predict(self, inputs: Any = None) -> Any:
        """What the last stage returns for a batch, the micro-batches joined, on its rank; None on the others."""
        self._begin(inputs, None, wants_loss=False)
        self._run_forward()
        if self.schedule.num_stages - 1 not in self._runs:
            return None
        joined = [
            manipulation.concat([creation.asarray(array) for array in arrays], axis=0)
            for arrays in zip(*self._outputs, strict=True)
        ]
        return joined[0] if len(joined) == 1 else tuple(joined)

    # A pass over a batch.

    def _begin(self, inputs: Any, targets: Any, *, wants_loss: bool, trains: bool = False) -> None:
        if self._last is not None:
            self._last.settle()
        most, last = self.schedule.num_microbatches, self.schedule.num_stages - 1
        self._inputs = Batch("inputs", inputs, most, exactly=trains) if 0 in self._runs else None
        rows = self._rows = self._links.begin(self._inputs)
        self._targets = None
        if wants_loss and last in self._runs:
            self._targets = Batch("targets", targets, len(rows), exactly=True)
            if self._targets.rows != rows:
                raise ArgumentError(
                    f"PipelineRunner: targets have {sum(self._targets.rows)} rows on rank {self.comm.rank}, but inputs "
                    f"have {sum(rows)} on rank {self.schedule.placement[0]}; both are of the same batch"
                )
        self._trains = trains
        self._laps = self._recording if trains else None  # what has another order is another schedule
        self._losses: list[tuple[float, Array]] = []
        self._outputs: list[list[Array]] = []

    def _run_forward(self) -> None:
        self._run(forward_only(self.schedule, len(self._rows)))

    def _run(self, schedule: Schedule) -> None:
        order = schedule.orders[self.comm.rank]
        if self._laps is not None:
            self._laps.begin_step()
        for place, action in enumerate(order):
            for coming in order[place : place + POSTED_AHEAD]:
                self._expect(coming)
            self._do[action.kind](action)
            self._note_end(action)

    def _note_end(self, action: Action) -> None:
        if self._laps is not None:
            self._laps.end(action)

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        run, is_last = self._runs[stage], stage == self.schedule.num_stages - 1
        targets = self._targets.part(microbatch) if self._targets is not None and is_last else None
        arrays = self._arrays_for(action)
        outputs = run.forward(microbatch, arrays, targets) if self._trains else run.infer(arrays, targets)
        if not is_last:
            self._pass_on(action, outputs)
        elif self._targets is not None:
            self._losses.append((self._weight(microbatch), outputs[0]))
        else:
            self._outputs.append(outputs)

    def _backward(self, action: Action) -> None:
        run = self._runs[action.stage]
        backward = run.backward if action.kind is ActionKind.BACKWARD else run.backward_input
        gradients = backward(action.microbatch, self._arrays_for(action), self._weight(action.microbatch))
        if action.stage:
            self._pass_on(action, gradients)

    def _backward_weight(self, action: Action) -> None:
        self._runs[action.stage].backward_weight(action.microbatch)

    def _reduce(self, action: Action) -> None:
        """The sum over micro-batches is complete, and with it, where stages share a parameter, theirs."""
        run = self._runs[action.stage]
        for parameter, gradient in zip(run.parameters, run.accumulator.sum(), strict=True):
            before = self._gradients.get(parameter)
            self._gradients[parameter] = gradient if before is None else before + gradient

    def _weight(self, microbatch: int) -> float:
        return self._rows[microbatch] / sum(self._rows)

    def _mean_loss(self) -> tuple[Tensor | None, PostedReceive | None]:
        """On the rank of the last stage the loss, which it tells the others; there the receive of it."""
        if self.comm.rank != self.schedule.placement[-1]:
            return None, self._links.receive_loss()
        loss = creation.asarray(np.float64(sum(weight * float(value) for weight, value in self._losses)))
        if self.dp is not None:
            loss = self.dp.all_reduce(loss, ReduceOp.AVG)
        self._links.send_loss(float(loss))
        return loss, None

    # What goes from action to action.

    def _arrays_for(self, action: Action) -> list[Array]:
        receive = self._needs(action)
        if receive is None:
            return self._inputs.arrays(action.microbatch) if self._inputs and action.kind is ActionKind.FORWARD else []
        if self._is_mine(receive):
            return self._made.pop(receive)
        arrays = self._links.receive(receive, self._specs(receive))
        self._note_end(receive)
        return arrays

    def _pass_on(self, action: Action, arrays: list[Array]) -> None:
        receive = next_receive(action)
        if self._is_mine(receive):
            self._made[receive] = arrays
        else:
            self._links.send(receive, arrays)

    def _expect(self, action: Action) -> None:
        receive = self._needs(action)
        if receive is not None and not self._is_mine(receive):
            specs = self._specs(receive)
            if specs is not None or receive.kind is ActionKind.RECV_F:
                self._links.expect(receive, specs)

    def _needs(self, action: Action) -> Action | None:
        """The receive that an action waits for, be it from a stage of this rank or of another; None at the ends."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is ActionKind.FORWARD and stage > 0:
            return Action(ActionKind.RECV_F, stage, microbatch)
        is_backward = action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
        if is_backward and stage < self.schedule.num_stages - 1:
            return Action(ActionKind.RECV_B, stage, microbatch)
        return None

    def _is_mine(self, receive: Action) -> bool:
        """Whether both ends of a message are on this rank."""
        placement = self.schedule.placement
        return placement[receive.stage] == placement[partner(receive).stage]

    def _specs(self, receive: Action) -> list[Spec] | None:
        """Of gradients, which are like what this stage has made."""
        if receive.kind is ActionKind.RECV_F:
            return None
        return self._runs[receive.stage].cotangent_specs(receive.microbatch)


def next_receive(action: Action) -> Action:
    """The receive, on the stage that is next, of what a forward or backward has made."""
    if action.kind is ActionKind.FORWARD:
        return Action(ActionKind.RECV_F, action.stage + 1, action.microbatch)
    return Action(ActionKind.RECV_B, action.stage - 1, action.microbatch)


def _check(stages: Mapping[int, Module], schedule: Schedule, comm: Communicator) -> None:
    if schedule.num_ranks != comm.world_size:
        raise ScheduleError(
            f"PipelineRunner: {schedule.name} is for {schedule.num_ranks} ranks, but communicator {comm.name!r} has "
            f"{comm.world_size}; build the schedule for that many"
        )
    expected = schedule.stages_of(comm.rank)
    if sorted(stages) != expected:
        raise ArgumentError(
            f"PipelineRunner: {schedule.name} gives rank {comm.rank} the stages {expected}, but stages= has "
            f"{sorted(stages)}"
        )
