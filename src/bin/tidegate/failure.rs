//! How a command fails, in the one form in which the program tells it.

use crate::check_config::CheckConfigError;
use crate::compare::CompareError;
#[cfg(feature = "server")]
use crate::convert::ConvertError;
use crate::demo::DemoError;
use crate::flags::InputError;
use crate::output::OutputError;
#[cfg(feature = "server")]
use crate::serve::ServeError;
use crate::simulate::SimulateError;
use crate::sweep::SweepError;
use crate::tune::TuneError;

/// Why the program ends before its work is done, or without the result that was asked for.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The command line is at fault.
    Usage(String),
    /// The command line is at fault, and standard error says so already.
    Told,
    /// The command failed.
    Failed(String),
    /// The reader of the output has gone.
    Closed,
}

impl From<OutputError> for Failure {
    fn from(error: OutputError) -> Self {
        match error {
            OutputError::Closed => Self::Closed,
            failed @ OutputError::Failed(_) => Self::Failed(failed.to_string()),
        }
    }
}

impl From<InputError> for Failure {
    fn from(error: InputError) -> Self {
        match error {
            InputError::Trace(error) => Self::Failed(error.to_string()),
            usage => Self::Usage(usage.to_string()),
        }
    }
}

impl From<DemoError> for Failure {
    fn from(error: DemoError) -> Self {
        match error {
            DemoError::Input(error) => error.into(),
            DemoError::File(error) => error.into(),
            DemoError::Output(error) => error.into(),
            failed => Self::Failed(failed.to_string()),
        }
    }
}

impl From<SimulateError> for Failure {
    fn from(error: SimulateError) -> Self {
        match error {
            SimulateError::Input(error) => error.into(),
            SimulateError::Output(error) => error.into(),
            failed @ SimulateError::Config(_) => Self::Failed(failed.to_string()),
        }
    }
}

impl From<SweepError> for Failure {
    fn from(error: SweepError) -> Self {
        match error {
            SweepError::Input(error) => error.into(),
            SweepError::Output(error) => error.into(),
            usage @ SweepError::NoCell { .. } => Self::Usage(usage.to_string()),
            failed => Self::Failed(failed.to_string()),
        }
    }
}

impl From<TuneError> for Failure {
    fn from(error: TuneError) -> Self {
        match error {
            TuneError::Input(error) => error.into(),
            TuneError::Output(error) => error.into(),
            failed => Self::Failed(failed.to_string()),
        }
    }
}

impl From<CompareError> for Failure {
    fn from(error: CompareError) -> Self {
        match error {
            CompareError::Input(error) => error.into(),
            CompareError::Output(error) => error.into(),
            failed => Self::Failed(failed.to_string()),
        }
    }
}

impl From<CheckConfigError> for Failure {
    fn from(error: CheckConfigError) -> Self {
        match error {
            CheckConfigError::Output(error) => error.into(),
            usage @ CheckConfigError::Mistakes { .. } => Self::Usage(usage.to_string()),
            failed => Self::Failed(failed.to_string()),
        }
    }
}

#[cfg(feature = "server")]
impl From<ServeError> for Failure {
    fn from(error: ServeError) -> Self {
        match error {
            ServeError::File(error) => error.into(),
            ServeError::Output(error) => error.into(),
            failed => Self::Failed(failed.to_string()),
        }
    }
}

#[cfg(feature = "server")]
impl From<ConvertError> for Failure {
    fn from(error: ConvertError) -> Self {
        match error {
            ConvertError::Output(error) => error.into(),
            usage @ ConvertError::Mistakes { .. } => Self::Usage(usage.to_string()),
            failed @ ConvertError::Unreadable { .. } => Self::Failed(failed.to_string()),
        }
    }
}
