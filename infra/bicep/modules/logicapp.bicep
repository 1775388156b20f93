metadata description = 'The Logic App that asks in Teams and sends the approve command. It reads its own subscription with its own identity.'

param name string
param location string
param tags object
param namespaceName string
param hostName string
param topicName string
param queueName string

@description('Ids of the team and its channel.')
param teamId string
param channelId string

@description('Resource id of a Log Analytics workspace for logs and metrics; empty: none.')
param workspaceId string

var subscriptionName = 'logicapp'
var serviceBusApi = subscriptionResourceId('Microsoft.Web/locations/managedApis', location, 'servicebus')
var teamsApi = subscriptionResourceId('Microsoft.Web/locations/managedApis', location, 'teams')

// any(): parameterValueSet, without which the connection would need a key, is missing from the type.
resource busConnection 'Microsoft.Web/connections@2016-06-01' = {
  name: '${name}-servicebus'
  location: location
  tags: tags
  properties: any({
    displayName: hostName
    api: {
      id: serviceBusApi
    }
    parameterValueSet: {
      name: 'managedIdentityAuth'
      values: {
        namespaceEndpoint: {
          value: 'sb://${hostName}/'
        }
      }
    }
  })
}

// Teams does not support managed identities: a user has to authorize this connection once in the portal.
resource teamsConnection 'Microsoft.Web/connections@2016-06-01' = {
  name: '${name}-teams'
  location: location
  tags: tags
  properties: {
    displayName: 'imds-bridge'
    api: {
      id: teamsApi
    }
  }
}

resource workflow 'Microsoft.Logic/workflows@2019-05-01' = {
  name: name
  location: location
  tags: tags
  identity: {
    type: 'SystemAssigned'
  }
  properties: {
    definition: loadJsonContent('../../consumers/logicapp/definition.json')
    parameters: {
      '$connections': {
        value: {
          servicebus: {
            connectionId: busConnection.id
            connectionName: busConnection.name
            id: serviceBusApi
            connectionProperties: {
              authentication: {
                type: 'ManagedServiceIdentity'
              }
            }
          }
          teams: {
            connectionId: teamsConnection.id
            connectionName: teamsConnection.name
            id: teamsApi
          }
        }
      }
      topic: {
        value: topicName
      }
      subscription: {
        value: subscriptionName
      }
      queue: {
        value: queueName
      }
      team: {
        value: teamId
      }
      channel: {
        value: channelId
      }
    }
  }
}

// The logs of its runs; a run that failed has asked nobody, or sent no command.
resource logs 'Microsoft.Insights/diagnosticSettings@2021-05-01-preview' = if (!empty(workspaceId)) {
  scope: workflow
  name: 'imds-bridge'
  properties: {
    workspaceId: workspaceId
    logs: [
      {
        categoryGroup: 'allLogs'
        enabled: true
      }
    ]
    metrics: [
      {
        category: 'AllMetrics'
        enabled: true
      }
    ]
  }
}

module subscribed 'subscription.bicep' = {
  name: 'imds-bridge-logicapp-subscription'
  params: {
    namespaceName: namespaceName
    topicName: topicName
    name: subscriptionName
    filter: 'cloudEvents_type = \'io.imdsbridge.scheduledevent.scheduled.v1\''
    timeToLive: 'P1D'
    deadLetterExpired: false
    receiverIds: [
      workflow.identity.principalId
    ]
  }
}

module sends 'sender.bicep' = {
  name: 'imds-bridge-logicapp-sender'
  params: {
    namespaceName: namespaceName
    queueName: queueName
    principalId: workflow.identity.principalId
  }
}
