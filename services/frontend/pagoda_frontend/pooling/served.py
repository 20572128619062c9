"""Says which paths a model serves. Knows its tasks; no bodies and no engine."""

from pagoda_common.params.pooling_params import PoolingTask, task_refusal
from pagoda_frontend.http.errors import NotServed
from pagoda_frontend.serving.served_model import ServedModel


def check_served(model: ServedModel, task: PoolingTask, *others: PoolingTask) -> None:
    """Check that this model serves a path.

    Args:
        task: task of the path.
        others: further tasks that can serve the path.

    Raises:
        NotServed: the model has none of them.
    """
    tasks = model.pooling_tasks
    if tasks and not {task, *others} & set(tasks):
        raise NotServed(task_refusal(task, tasks, model.unserved_pooling_tasks).message, field="model")
