"""Which paths a model answers. Knows its tasks; no bodies and no engine."""

from pagoda_common.params.pooling_params import PoolingTask, task_refusal
from pagoda_frontend.http.errors import NotServed
from pagoda_frontend.serving.served_model import ServedModel


def check_served(model: ServedModel, task: PoolingTask, *others: PoolingTask) -> None:
    """Check that a path is for this model.

    Args:
        task: what the path does.
        others: tasks by which it can be done as well.

    Raises:
        NotServed: the model has none of them.
    """
    tasks = model.pooling_tasks
    if tasks and not {task, *others} & set(tasks):
        raise NotServed(task_refusal(task, tasks, model.unserved_pooling_tasks).message, field="model")
